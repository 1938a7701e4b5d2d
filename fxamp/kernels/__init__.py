"""Gradient kernels: find inf and NaN in gradients and unscale them, and update the loss scale, without a host sync.

    check_unscale_(grads, inv_scale, found_inf, flags, squared_norm)    in place, for ``GradScaler.unscale_``
    check_(grads, found_inf, flags, squared_norm)                       writes nothing to the gradients
    update_scale_(scale, growth_tracker, found_inf, ...)                growth and back-off
    torch.ops.fxamp.check_unscale(gradients, inv_scale, dtype)          the same work inside compiled graphs
    torch.ops.fxamp.check_unscale_norm(gradients, inv_scale, dtype)
    torch.ops.fxamp.check(gradients)

Beside them, and made of ATen ops alone: ``torch.ops.fxamp.scaled_linear``, a linear layer in 8-bit floats.

On a CUDA device this is a generated Triton kernel, elsewhere (or without Triton) its reference in ATen ops. One launch
serves any number of gradients of one dtype pair, and reads each gradient once. Bytes of memory traffic a parameter:

    float16 -> float32, checked, unscaled               6    a cast, then torch's foreach op: 14
    the same with the squared norm                      6    and a norm's pass: 18
    float32 in place                                    8    torch's foreach op: 8
    the same with the squared norm                      8    torch's, and a norm's pass: 12
    float32 checked only                                4

How a call flows, a module a step:

    in_place, ops    the entries
    devices          gradients of several devices: a share each, results brought together
    dispatch         Triton, or the reference
    plan             which gradients share a launch, what its kernel must know
    source, store    the plan's kernel as Triton source, in a file (Triton reads it there, and so can you)
    launch           the table of addresses, the launches
    update           the scale update, its text in update_source
    reference        what it all means, in ATen ops; it knows nothing of the kernels, nor they of it

Why a table of addresses: a launch for each gradient costs some 15 microseconds each, and a kernel with all addresses as
arguments compiles for minutes at 128 gradients. Why generated source: a kernel holds just the conversions and results
that were asked for, and what runs can be read. Why no atomics: flags are plain stores of a constant, and the norm has
one partial sum a program, so results do not depend on the order of programs.
"""

from fxamp.kernels.dispatch import Implementation, forced
from fxamp.kernels.in_place import check_, check_unscale_
from fxamp.kernels.ops import check, check_unscale, check_unscale_norm
from fxamp.kernels.plan import bytes_moved
from fxamp.kernels.scaled_linear import scaled_linear
from fxamp.kernels.update import update_scale_

__all__ = [
    "Implementation",
    "bytes_moved",
    "check",
    "check_",
    "check_unscale",
    "check_unscale_",
    "check_unscale_norm",
    "forced",
    "scaled_linear",
    "update_scale_",
]
