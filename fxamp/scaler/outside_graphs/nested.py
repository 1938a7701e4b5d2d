"""Autograd nodes whose backward runs another backward, which a walk from the loss cannot see.

The gradients that the inner backward leaves in ``.grad`` would stay scaled. torch's reentrant checkpoint does this, and
is recognised by its name. Reversible layers and other libraries' checkpoints are detected when they run.
"""

from functools import cache, partial
from threading import Lock
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from fxamp.errors import UnscaledError
from fxamp.torch_dtypes import HALVES
from fxamp.torch_private import Node, function_of, running_backward, untraced

REMEDY = "Or leave 'scaler' out of the options: the scaler then works as torch.amp.GradScaler does"


def refuse_reentrant(node: Node, crossing: bool) -> None:
    """Raise UnscaledError for a reentrant checkpoint that computes in float16.

    ``crossing``: whether float16 gradients enter or leave it. If they do not, it still computes in float16 if it runs
    under autocast and its function was not compiled.
    """
    if function_of(node) is not CheckpointFunction:
        return
    if crossing or (_recomputes_in_float16(node) and not _compiled(node.run_function)):
        raise UnscaledError(
            "a reentrant checkpoint outside the compiled graphs computes in float16, and its backward cannot be "
            f"followed; accepted with a scaler in the options: checkpoint(..., use_reentrant=False). {REMEDY}"
        )


def _recomputes_in_float16(node: Node) -> bool:
    settings = (node.device_autocast_kwargs, node.cpu_autocast_kwargs)
    return any(setting and setting["enabled"] and setting["dtype"] in HALVES for setting in settings)


def _compiled(function: Any) -> bool:
    """Whether torch.compile returned ``function``, or compiled its module, which may forward attributes of another."""
    if not isinstance(function, torch.nn.Module) and hasattr(function, "_torchdynamo_orig_callable"):
        return True
    module = getattr(function, "__self__", function)
    return isinstance(module, torch.nn.Module) and (
        module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule)
    )


def refuse_nested(node: Node) -> None:
    """Make ``node``, a custom Function's, raise UnscaledError if its backward runs another backward."""
    before: list[int] = []
    node.register_prehook(partial(_entering, before))
    node.register_hook(partial(_leaving, before, node.name().removesuffix("Backward")))


@untraced
def _entering(before: list[int], _: Any) -> None:
    before.append(_backwards().count())


@untraced
def _leaving(before: list[int], name: str, *_: Any) -> None:
    if _backwards().count() != before.pop():
        raise UnscaledError(
            f"{name} runs another backward inside its own; the gradients of that backward would stay scaled. Accepted "
            f"with a scaler in the options: a backward that returns all its gradients, or one in a compiled graph. "
            f"{REMEDY}"
        )


class _Backwards:
    """Counts the backwards that autograd has run in this process, except this class's own probes."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._probes = 0
        self._last = -1
        with torch.inference_mode(False), torch.enable_grad():
            self._leaf = torch.zeros((), device="cpu", requires_grad=True)
            self._probe = self._leaf.clone()
        self._probe.register_hook(self._note)  # type: ignore[no-untyped-call]

    def count(self) -> int:
        """Return the count. Autograd tells the number of a backward only while that runs, so this runs one."""
        with self._lock:
            torch.autograd.grad(self._probe, self._leaf, retain_graph=True)
            self._probes += 1
            return self._last - self._probes

    def _note(self, _: torch.Tensor) -> None:
        self._last = running_backward()


@cache
def _backwards() -> _Backwards:
    return _Backwards()
