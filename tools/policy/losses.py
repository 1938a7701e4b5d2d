"""The loss that the backward starts from: the one that MODEL.py defines, or a substitute."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fxamp.errors import ListingError

ACCEPTED = "loss(output) that returns one floating-point number, or an output that is one or has one as .loss"


class Loss:
    """Computes the loss of an output; reports once, through ``notice``, which value is used as the loss."""

    def __init__(self, file: str, given: Callable[[Any], Any] | None, notice: Callable[[str], None]) -> None:
        self._file = file
        self._given = given
        self._notice = notice
        self._said = False

    def __call__(self, output: Any) -> Tensor:
        """Return the loss, a tensor with one number. Raises ListingError if there is none."""
        loss, words = self._find(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise ListingError(f"{self._file}: {words} is {_described(loss)}; accepted: {ACCEPTED}")
        if not self._said:
            self._notice(f"the loss is {words}")
            self._said = True
        return loss.reshape(())

    def _find(self, output: Any) -> tuple[Any, str]:
        if self._given is not None:
            return self._given(output), "loss(output)"
        if isinstance(output, Tensor) and output.numel() == 1:
            return output, "the output itself"
        named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if named is not None:
            return named, "output.loss"
        floats = floating(output)
        if not floats:
            raise ListingError(f"{self._file}: the output holds no floating-point tensor; accepted: {ACCEPTED}")
        return floats[0].sum(), "the sum of the output" if len(floats) == 1 else "the sum of the first float output"


def given_loss(file: str, given: Any, notice: Callable[[str], None]) -> Loss:
    """Return the loss for ``given``, the value of ``loss`` in MODEL.py, None if it is not defined."""
    if given is not None and not callable(given):
        raise ListingError(f"{file}: loss is of type {type(given).__name__}; accepted: a function loss(output)")
    return Loss(file, given, notice)


def floating(output: Any) -> list[Tensor]:
    """Return the floating-point tensors in an output, in order; dataclass-like outputs of transformers work too."""
    leaves = pytree.tree_leaves(output)
    if len(leaves) == 1 and not isinstance(leaves[0], Tensor) and hasattr(leaves[0], "__dict__"):
        leaves = pytree.tree_leaves(vars(leaves[0]))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"a tensor of shape {list(value.shape)} and {value.dtype}"
