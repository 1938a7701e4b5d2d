"""Mixed precision for PyTorch as a torch.compile backend.

    torch.compile(model, backend="fxamp", options={"policy": "cuda-float16"})

All public names are here. Modules that import torch or triton load on first use.
"""

from typing import TYPE_CHECKING, Any

from fxamp.torch_version import require_torch

require_torch()

if TYPE_CHECKING:
    from fxamp.backend.rewrite import rewrite
    from fxamp.errors import FxampError
    from fxamp.optim.compile_optimizer import compile_optimizer
    from fxamp.policy import CastRule, ChunkRule, DropRule, KeepRule, Policy, Rule
    from fxamp.reports.report import report
    from fxamp.scaler import GradScaler

__version__ = "0.1.0"
__all__ = [
    "CastRule",
    "ChunkRule",
    "DropRule",
    "FxampError",
    "GradScaler",
    "KeepRule",
    "Policy",
    "Rule",
    "compile_optimizer",
    "report",
    "rewrite",
]

_HOMES = {
    **dict.fromkeys(("CastRule", "ChunkRule", "DropRule", "KeepRule", "Policy", "Rule"), "fxamp.policy"),
    "FxampError": "fxamp.errors",
    "GradScaler": "fxamp.scaler",
    "compile_optimizer": "fxamp.optim.compile_optimizer",
    "report": "fxamp.reports.report",
    "rewrite": "fxamp.backend.rewrite",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or the adapters for frameworks, on first use (PEP 562)."""
    from importlib import import_module

    if name == "frameworks":
        return import_module("fxamp.frameworks")
    if name not in _HOMES:
        from fxamp.errors import nearest

        accepted = f"accepted: {', '.join(__all__)}"
        raise AttributeError(f"module 'fxamp' has no attribute {name!r}{nearest(name, __all__)}; {accepted}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
