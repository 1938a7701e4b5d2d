"""Mixed precision for PyTorch as a torch.compile backend.

    model.compile(backend="fxamp", options={"policy": "cuda-float16"})

All public names are here, and in ``fxamp.frameworks`` the adapters for other libraries:

- ``report(model)``: what the backend compiled, in which dtypes, and what stayed outside.
- ``GradScaler``: torch.amp.GradScaler's contract; with it in the options, the compiled backward scales and unscales.
- ``compile_optimizer(optimizer)``: runs ``optimizer.step()`` compiled, with state in fewer bits where a policy says so.
- ``rewrite(model, inputs, policy)``: the rewritten graph as a torch.fx.GraphModule, without torch.compile.
- ``Policy``, ``Rule`` and its kinds ``CastRule``, ``KeepRule``, ``ChunkRule``, ``DropRule``: a policy file as data.
- ``FxampError``: the base of all errors that fxamp raises on purpose.

Modules that import torch or triton load on first use.
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
