"""State in fewer bits: a tensor that looks like the optimizer's, stored as bfloat16 or as 8-bit codes with scales.

For a DTensor parameter the state is a DTensor whose local part is packed, in blocks of that part. Any op can read the
values; an op that writes to the tensor rounds to nearest. Views are refused, because a write to a view would only reach
a copy.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxamp.errors import UnsupportedOpError
from fxamp.kernels.blockwise_8bit import block_scales, decode, encode
from fxamp.optim.shards import joined, local

BFLOAT16 = "bfloat16"

aten = torch.ops.aten


class PackedTensor(Tensor):
    """``parts`` hold the elements in the order of memory: bfloat16 values, or codes and scales.

    ``form``: "bfloat16", or one of :data:`fxamp.kernels.blockwise_8bit.CODES`.
    """

    parts: tuple[Tensor, ...]
    form: str

    @staticmethod
    def __new__(cls, like: Tensor, form: str, parts: tuple[Tensor, ...]) -> "PackedTensor":
        """``like``: a dense tensor with the same dtype, size and strides."""
        packed: PackedTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=parts[0].device
        )
        packed.form, packed.parts = form, parts
        return packed

    @classmethod
    def of(cls, value: Tensor, form: str) -> "PackedTensor":
        """Return the dense tensor ``value`` packed, rounded to nearest."""
        return cls(value, form, packed_parts(in_memory_order(value).float(), form))

    def unpacked(self) -> Tensor:
        """Return its values as an ordinary tensor of the same dtype, size and strides."""
        flat = unpacked_parts(self.parts, self.form)
        return flat.to(self.dtype).as_strided(self.shape, self.stride())

    def store(self, values: Tensor) -> None:
        """Store ``values``, of the same size and strides, rounded to nearest."""
        for part, new in zip(self.parts, packed_parts(in_memory_order(values).float(), self.form), strict=True):
            part.copy_(new)

    @property
    def data(self) -> "PackedTensor":
        """A tensor with the same parts; assigning to it stores values of the same dtype and size."""
        return PackedTensor(self, self.form, self.parts)

    @data.setter
    def data(self, values: Tensor) -> None:
        if (values.dtype, values.shape) != (self.dtype, self.shape):
            raise UnsupportedOpError(
                f"{values.dtype} {list(values.shape)} was assigned to the data of an optimizer's state that is kept as "
                f"{self.form}; accepted: {self.dtype} {list(self.shape)}"
            )
        with torch.no_grad():
            self.copy_(values)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedTensor({self.form!r}, {self.unpacked()!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0], args[0].form, args[0].parts)
        if func is aten.clone.default:
            return cls(args[0], args[0].form, tuple(part.clone() for part in args[0].parts))
        if func.is_view or torch.Tag.inplace_view in func.tags:
            raise UnsupportedOpError(
                f"{func} of an optimizer's state that is kept as {args[0].form} would be a view of 8- or 16-bit codes; "
                "accepted: ops that compute new values, and any op on what .unpacked() returns"
            )
        values: list[tuple[PackedTensor, Tensor]] = []

        def value_of(leaf: Any) -> Any:
            # A tensor that is passed twice is unpacked once: an op's write to one argument must be visible in the
            # other.
            if not isinstance(leaf, PackedTensor):
                return leaf
            value = next((tensor for packed, tensor in values if packed is leaf), None)
            if value is None:
                value = leaf.unpacked()
                values.append((leaf, value))
            return value

        result = func(*pytree.tree_map(value_of, args), **pytree.tree_map(value_of, kwargs))
        if not func._schema.is_mutable:
            return result
        for packed in _written(func, args, kwargs):
            packed.store(next(tensor for other, tensor in values if other is packed))
        packed_by_value = {id(tensor): packed for packed, tensor in values}
        return pytree.tree_map(lambda leaf: packed_by_value.get(id(leaf), leaf), result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[PackedTensor]:
    """Return the arguments that the op writes to."""
    arguments = func._schema.arguments
    values = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    changed = [values.get(argument.name) for argument in arguments if argument.is_write]
    return [leaf for leaf in pytree.tree_leaves(changed) if isinstance(leaf, PackedTensor)]


def is_packed(value: Any) -> bool:
    """Whether a value of the state, or this rank's part of it, is packed."""
    return isinstance(local(value), PackedTensor)


def unpacked(value: Any) -> Any:
    """Return a packed tensor or DTensor as an ordinary one; anything else unchanged."""
    part = local(value)
    if not isinstance(part, PackedTensor):
        return value
    return part.unpacked() if part is value else joined(part.unpacked(), value)


def packed_copy(value: Tensor) -> Tensor:
    """Return a copy of a packed tensor or DTensor, packed alike."""
    part: Tensor = local(value)
    return part.clone() if part is value else joined(part.clone(), value)


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view of a dense tensor, in the order of memory; a 0-dim tensor unchanged."""
    tensor = tensor.detach()
    if tensor.dim() <= 1:
        return tensor
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def packed_parts(flat: Tensor, form: str) -> tuple[Tensor, ...]:
    """Return the float32 tensor ``flat`` as parts, rounded to nearest."""
    if form == BFLOAT16:
        return (flat.to(torch.bfloat16),)
    scales = block_scales(flat)
    return encode(flat, scales, torch.zeros((), dtype=torch.int32, device=flat.device), form, -1), scales


def unpacked_parts(parts: tuple[Tensor, ...], form: str) -> Tensor:
    """Return the flat float32 tensor that the parts represent."""
    if form == BFLOAT16:
        return parts[0].to(torch.float32)
    decoded: Tensor = decode(*parts, form)
    return decoded
