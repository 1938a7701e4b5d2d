"""A dispatch mode that sees every op that runs, eagerly or in a compiled graph."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class RunningOps(TorchDispatchMode):
    """Calls :meth:`ran` after each op that runs inside the mode. Ops that a compiler runs to trace do not count.

    Compiled graphs run inside the mode too, but code from Inductor calls no ops.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: compiled frames run inside this mode and are not skipped."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: what the compiler itself computes does not count."""
        return True

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.ran(func, args, kwargs, result)
        return result

    @abstractmethod
    def ran(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Take note of an op, with what it was called with and what it returned."""
