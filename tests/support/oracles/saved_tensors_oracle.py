"""What packing must do, by eager autograd: its saved tensors packed and unpacked by hooks, written independently."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.partitioners import default_partition
from torch.autograd.graph import saved_tensors_hooks

LARGEST = {torch.int8: 126.0, torch.float8_e4m3fn: 416.0, torch.float8_e5m2: 49152.0}


def in_eight_bits(flat: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    """``flat`` as it comes back from ``dtype`` with a bfloat16 scale for each ``block`` elements."""
    wide = flat.float().reshape(-1, block)
    top = torch.where(wide.isfinite(), wide.abs(), 0.0).amax(1, keepdim=True).clamp_min(1e-30)
    scale = (top / LARGEST[dtype]).bfloat16().float()
    codes = (wide / scale).nan_to_num(0.0, 0.0, 0.0)
    if dtype is torch.int8:
        codes = codes.round()
    else:  # of at least the smallest subnormal, so that signs survive
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        codes = torch.where((wide != 0) & (codes.abs() < smallest), smallest * wide.sign(), codes)
    codes = codes.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).float()
    limit = torch.finfo(flat.dtype).max
    back = (codes * scale).clamp(-limit, limit)
    return torch.where(wide.isfinite(), back, wide).to(flat.dtype).reshape(flat.shape)


def as_autograd_keeps(gm: Any, inputs: Any, **settings: Any) -> Any:
    """Partition; the min cut chooses different values than autograd, and computes the rest again: this does not."""
    return default_partition(gm, inputs, num_fwd_outputs=settings["num_fwd_outputs"])


def memory(tensor: Tensor) -> Tensor:
    """All of the memory that ``tensor`` is a view of, as one dimension."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


def packed_gradients(
    model: nn.Module, inputs: Iterable[Tensor], squeeze: Callable[[Tensor], Tensor], least: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients of eager autocast, with ``squeeze`` over each saved memory of ``least`` elements."""
    inputs = list(inputs)
    there = {value.untyped_storage().data_ptr() for value in (*inputs, *model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        flat = memory(tensor) if tensor.is_floating_point() else torch.empty(0)
        if flat.numel() < least or tensor.untyped_storage().data_ptr() in there:
            return tensor
        return squeeze(flat).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    model.zero_grad()
    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        loss = model(*inputs)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
