"""Run time of loss scaling: the scaler that a training loop talks to, and what it is made of.

    scaler = fxamp.GradScaler("cuda", min_scale=1.0)
    scaler.name_parameters(model)
    for x, y in data:
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y)).backward()
        if not scaler.step(optimizer, return_skipped=True).skipped:
            scheduler.step()
        scaler.update()
    print(scaler.loss_scale, scaler.skipped_steps, scaler.overflowed())

Given to the backend, every compiled graph is a scaled island: gradients enter it true and leave it true. float16 code
outside of the graphs is followed from the loss that is scaled: its gradients hold the scale there, and true ones come
out of it, as out of a graph. What cannot be followed is refused by name. An overflow is never lost: a gradient is
trusted only while it is the very tensor that a graph checked, else its values are read again; the flag of a gradient
that no parameter owns (an activation's, a leaf input's) counts for every optimizer; flags last until ``update``.

How an optimizer's step flows, a module a step:

    grad_scaler       the public face: order of calls, and who decides
    optimizer_check   one optimizer's gradients: flags that compiled graphs left, kernels for the others
    checks            find the gradients, call the kernels
    graph_link        the scaler's link to compiled graphs: attached or not, what they reported
    float16_flow      the walk from a scaled loss; borders: what it meets; nested, compressed: what is refused
    graph_flags       what the compiled backwards said since the last update
    distributed       all ranks agree
    compiled_steps    skip="device": steps compiled by fxamp.optim; clipping: the rule of clip_grad_norm_
    fused             torch's optimizers that decide on the device
    outcomes          was it taken? told to schedulers without waiting
    scale_update      the rule of growth and back-off
    names             who overflowed, how often; flag_table counts it on the device
    state, outputs    what is remembered; what is scaled
    untraced          none of it is traced by torch.compile
"""

from fxamp.scaler.grad_scaler import GradScaler
from fxamp.scaler.state import StepResult

__all__ = ["GradScaler", "StepResult"]
