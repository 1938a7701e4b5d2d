"""GPT-2 124M in its own shapes: a model for ``fxamp-policy fit`` to count."""

from typing import Any

import torch

from fxamp.tools.bench.models import build

model: Any
with torch.device("meta"):
    model, (inputs,) = build("gpt2-124m", "full", 0, 1)
model.loss_type = "ForCausalLM"  # as it is; else transformers logs so, which breaks the graph before the loss
