"""Multiplies under a policy file, then under what it is edited to: ``python cached_product.py FILE FACTOR EDITED``."""

import shutil
import sys

import torch
from torch._dynamo.utils import counters


def product(policy: str, factor: float) -> tuple[bool, bool]:
    """Whether the product is float32's, and whether its code was on disk. ``factor`` is a constant of the graph."""
    torch._dynamo.reset()
    x = torch.full((2, 2), 1 + 2**-10)
    before = _hits()
    compiled = torch.compile(lambda a: (a @ a) * factor, backend="fxamp", options={"policy": policy})
    return torch.equal(compiled(x), (x @ x) * factor), _hits() > before


def _hits() -> int:
    return int(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])


if __name__ == "__main__":
    file, factor, edited = sys.argv[1:]
    print(*product(file, float(factor)))
    shutil.copyfile(edited, file)
    print(*product(file, float(factor)))
