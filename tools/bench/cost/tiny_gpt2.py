"""The model of the errors: a tiny GPT-2 with random weights, wide enough for fp8 and kept rules."""

import torch

from fxamp.tools.bench.models import MODELS

_SIZES = {"layers": 2, "width": 64, "heads": 2, "vocabulary": 128, "length": 64, "batch": 2}

torch.manual_seed(0)
model = MODELS["gpt2-124m"].build(**_SIZES)
inputs = MODELS["gpt2-124m"].batch(**_SIZES)
