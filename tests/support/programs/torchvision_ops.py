"""torchvision beside a torch that it was not built for: its compiled ops do not load, and then its import fails.

PyPI's torchvision is built for PyPI's torch; a CPU build of torch cannot load its library. torchvision itself goes on
without it, but for two ops that it gives fake kernels as it is imported. transformers imports torchvision wherever it
is installed, and so would fail too.
"""

import importlib.util
from pathlib import Path

import torch

#: The ops that get a fake kernel even where the library did not load.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def define_missing_ops() -> None:
    """Define, without kernels, what ``import torchvision`` needs, if it is installed and its library does not load."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        for schema in _SCHEMAS:
            torch.library.define(f"torchvision::{schema.partition('(')[0]}", f"({schema.partition('(')[2]}")
