"""A small sister of ``gpt2.py``, on which errors are measured."""

from typing import Any

from fxamp.tools.bench.models import build

model: Any
model, (inputs,) = build("gpt2-124m", "tiny", 0, 1, {"layers": 3, "width": 128, "length": 64})
model.loss_type = "ForCausalLM"
