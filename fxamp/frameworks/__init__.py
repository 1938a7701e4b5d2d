"""One line for a training loop that is not your own, a module for each framework, imported only when asked for.

    fxamp.frameworks.transformers.FxampCallback(policy=...)       Trainer(callbacks=[...])
    fxamp.frameworks.accelerate.prepare(accelerator, model, ...)  in the place of accelerator.prepare(...)
    fxamp.frameworks.lightning.FxampPrecision(policy=...)         Trainer(plugins=[...])

Each brings the scaler that float16 needs, compiles what the framework really calls, and sees through the framework's
wrapped optimizer, so that ``skip="device"`` holds.
"""

from typing import Any

__all__ = ["accelerate", "lightning", "transformers"]


def __getattr__(name: str) -> Any:
    """Import a framework's module when it is first asked for (PEP 562)."""
    from importlib import import_module

    if name in __all__:
        return import_module(f"fxamp.frameworks.{name}")
    raise AttributeError(f"module 'fxamp.frameworks' has no attribute {name!r}")
