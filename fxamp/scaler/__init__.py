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

Three folders, each of which imports only those below it, and ``scale``, the scale's arithmetic:

    torch_contract    torch.amp.GradScaler's contract: the class, the check of gradients, who runs a step
    graphs            compiled graphs: their backwards scale, unscale and check inside, and report flags
    outside_graphs    float16 outside of graphs: the walk from a scaled loss, and what cannot be followed

``fxamp/scaler/README.md`` shows how a step runs.
"""

from fxamp.scaler.torch_contract.grad_scaler import GradScaler
from fxamp.scaler.torch_contract.optimizer_record import StepResult
