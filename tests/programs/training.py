"""A training loop around a program, which may end in the middle and go on in a new process."""

import io
from dataclasses import replace
from typing import Any

import torch
from programs.outcome import Outcome, Run, backward, leaf_versions, named_tensors, outcome, scale_of, terms
from programs.program import Setting
from torch import Tensor

_STEPS = 4


def train(run: Run, setting: Setting) -> Outcome:
    """Four steps; with the schedule "restart" a compiled program starts again, from files, after the second."""
    optimizer, copies = _optimizer(run), list[Tensor]()
    written: set[str] = set()
    for step in range(_STEPS):
        if step == _STEPS // 2 and setting.schedule == "restart" and run.afresh is not None:
            run, optimizer = _restarted(run, optimizer, run.afresh())
        named = named_tensors(run.module, run.inputs)
        versions = leaf_versions(named)
        for tensor in named.values():
            tensor.grad = None
        results = list(run.call(*run.inputs))
        copies += [result.detach().clone() for result in results]
        written |= {name for name, version in versions.items() if named[name]._version != version}
        backward(terms(results, named, setting), run.scaler)
        _step(run, optimizer)
    scale = None if run.scaler is None else scale_of(run.scaler)
    return outcome(named, results, copies, scale, frozenset(written))


def _optimizer(run: Run) -> torch.optim.Optimizer | None:
    parameters = [parameter for parameter in run.module.parameters() if parameter.requires_grad]
    if not parameters:
        return None
    # Without weight decay: that of a gradient of zeros differs from that of None.
    optimizer = torch.optim.Adam(parameters, lr=0.01, foreach=False)
    if run.compile_optimizer is not None:
        run.compile_optimizer(optimizer)
    return optimizer


def _step(run: Run, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is None or all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        return
    if run.scaler is None:
        optimizer.step()
        return
    run.scaler.step(optimizer)
    run.scaler.update()


def _restarted(
    run: Run, optimizer: torch.optim.Optimizer | None, afresh: Run
) -> tuple[Run, torch.optim.Optimizer | None]:
    """Save the state of ``run``, and load it into ``afresh``; the inputs stay what they are."""
    file = io.BytesIO()
    torch.save([None if part is None else part.state_dict() for part in (run.module, optimizer, run.scaler)], file)
    file.seek(0)
    states: list[Any] = torch.load(file)
    ours = _optimizer(afresh)
    for part, state in zip((afresh.module, ours, afresh.scaler), states, strict=True):
        if part is not None:
            part.load_state_dict(state)
    return replace(afresh, inputs=run.inputs), ours
