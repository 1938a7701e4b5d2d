"""Gradient kernels: find inf and NaN in gradients and unscale them, and update the loss scale, without a host sync.

    check_unscale_(grads, inv_scale, found_inf, flags, squared_norm)    in place, for ``GradScaler.unscale_``
    check_(grads, found_inf, flags, squared_norm)                       writes nothing to the gradients
    update_scale_(scale, growth_tracker, found_inf, rule)               growth and backoff
    torch.ops.fxamp.check_unscale(gradients, inv_scale, dtype)          the same work inside compiled graphs
    torch.ops.fxamp.check_unscale_norm(gradients, inv_scale, dtype)

Other kernels are ops that AOTAutograd traces: products in 8 and 4 bits (``products``), a loss in chunks of rows
(``linear_cross_entropy``, ``chunk_sums``), floats in fewer bits (``blockwise_8bit``), copies to the host's memory
(``host_memory``), and gradients that an optimizer takes during the backward (``hand_over``).

On a CUDA device the gradient kernels are generated Triton kernels, on a CPU they are torch's foreach ops, and elsewhere
or without Triton they are the reference in ATen ops. One Triton launch handles any number of gradients of one dtype
pair, and reads each gradient once. Bytes of memory traffic per parameter:
    float16 -> float32, checked, unscaled               6    a cast, then torch's foreach op: 14
    the same with the squared norm                      6    with a separate pass for the norm: 18
    float32 in place                                    8    torch's foreach op: 8
    the same with the squared norm                      8    torch's, with a separate pass for the norm: 12
    float32 checked only                                4

The modules, in the order of a call:

    in_place, ops       the entry points
    per_device          gradients on several devices: work for each device, then combined results
    dispatch            Triton, torch's ops for CPUs (host), or the reference
    launch_plan         which gradients share a launch, and what its kernel depends on
    gradient_triton     the plan's kernel as Triton source
    store               that source in a file: Triton reads it there, and users can too
    launch              the table of addresses, the launches
    loss_scale_update   growth and backoff of the loss scale; its source is in loss_scale_update_triton
    reference           the definition in ATen ops; it shares no code with the kernels

Kernels read a table of addresses, because one launch per gradient would cost about 15 microseconds each, and a kernel
with all addresses as arguments takes minutes to compile for 128 gradients. Their source is generated, so that a kernel
contains only the conversions and results that were requested, and its code can be read. They need no atomics: flags are
plain stores of a constant, and the norm has one partial sum per program, so results do not depend on the order of
programs.
"""

from fxamp.kernels.dispatch import Implementation, forced
from fxamp.kernels.gradient_request import ScaleRule
from fxamp.kernels.in_place import check_, check_unscale_
from fxamp.kernels.loss_scale_update import update_scale_
from fxamp.kernels.ops import check_unscale, check_unscale_norm
