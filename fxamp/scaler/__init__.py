"""Loss scaling at run time: the scaler that a training loop calls, and its parts.

    scaler = fxamp.GradScaler("cuda", min_scale=1.0)
    scaler.name_parameters(model)
    for x, y in data:
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y)).backward()
        if not scaler.step(optimizer, return_skipped=True).skipped:
            scheduler.step()
        scaler.update()
    print(scaler.loss_scale, scaler.skipped_steps, scaler.overflowed())

If the scaler is given to the backend, every compiled graph scales its gradients inside: gradients enter and leave the
graph unscaled. float16 code outside the graphs is found by a walk from the scaled loss: its gradients are scaled there
and unscaled where they leave it. Code that fxamp cannot follow raises an error that names it. No overflow is lost: a
graph's check counts only while ``.grad`` is the tensor that the graph checked, unmodified; otherwise the gradient is
checked again. The flag of a gradient that belongs to no parameter (an activation's, a leaf input's) counts for every
optimizer. Flags are kept until ``update``.

The modules, in the order in which an optimizer's step uses them:

    grad_scaler       the public class: order of calls, and whether the host or the device decides on a skip
    optimizer_check   one optimizer's gradients: flags from compiled graphs, kernels for the others
    gradients         find the gradients, those of DTensors and sparse ones too, and call the kernels
    graph_link        the scaler's link to compiled graphs: whether it is attached, what they reported
    float16_flow      the walk from a scaled loss; borders: the nodes it finds
    nested            unsupported cases, refused by name; compressed, joining: those of DistributedDataParallel
    graph_flags       what the compiled backwards reported since the last update
    rank_agreement    all ranks agree on a skip
    compiled_steps    skip="device": steps compiled by fxamp.optim; clipping: clip_grad_norm_'s rule
    fused             torch's optimizers that decide on the device
    outcomes          whether a step was taken, reported to schedulers without waiting
    scale_update      growth and backoff of the scale
    names             which parameters overflowed, and how often; flag_table counts on the device
    state, outputs    the scaler's saved state; walks the outputs that are scaled
"""

from fxamp.scaler.contract.grad_scaler import GradScaler
from fxamp.scaler.contract.state import StepResult

__all__ = ["GradScaler", "StepResult"]
