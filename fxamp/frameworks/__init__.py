"""Adapters for frameworks that own the training loop, one line each. A framework's module is imported on first access.

    fxamp.frameworks.transformers.FxampCallback(policy=...)       Trainer(callbacks=[...])
    fxamp.frameworks.accelerate.prepare(accelerator, model, ...)  instead of accelerator.prepare(...)
    fxamp.frameworks.lightning.FxampPrecision(policy=...)         Trainer(plugins=[...])

Each one adds the scaler that float16 needs, compiles the functions that the framework calls, and steps the optimizer
that the framework wraps, so that ``skip="device"`` works.
"""

from typing import Any

__all__ = ["accelerate", "lightning", "transformers"]


def __getattr__(name: str) -> Any:
    """Import a framework's module on first access (PEP 562)."""
    from importlib import import_module

    if name in __all__:
        return import_module(f"fxamp.frameworks.{name}")
    raise AttributeError(f"module 'fxamp.frameworks' has no attribute {name!r}")
