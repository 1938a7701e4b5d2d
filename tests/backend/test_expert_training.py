"""500 steps of a small mixture of experts of transformers: where the loss ends in MXFP8."""

import pytest
import torch
from support.programs.small_models import mixture

import fxamp
from fxamp.reports.report import Report

STEPS, LAST = 500, 50


def losses(policy: str) -> tuple[float, float, Report]:
    """The mean losses of the first ten steps and of the last, on a text that repeats with noise."""
    torch._dynamo.reset()
    model = mixture(64, 1)
    model.compile(backend="fxamp", options={"policy": policy, "lowering": "aot_eager"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)
    torch.manual_seed(1)
    text = (torch.arange(4096) * 7 % 64 + (torch.rand(4096) < 0.1)) % 64
    values = []
    for start in torch.randint(4096 - 16, (STEPS, 4)):
        tokens = torch.stack([text[at : at + 16] for at in start.tolist()])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        values.append(float(loss.detach()))
    return sum(values[:10]) / 10, sum(values[-LAST:]) / LAST, fxamp.report(model)


@pytest.mark.exhaustive
def test_a_mixture_in_mxfp8_learns_as_much_as_in_bfloat16() -> None:
    """At most 1 % above: -1.3 to 0.65 % with this seed and the next two, by the kind of CPU."""
    first, plain, _ = losses("cpu-bfloat16-moe")
    _, blocks, report = losses("cpu-bfloat16-mxfp8-moe")
    experts = [entry for entry in report.graphs[0].listing.entries if "scaled_experts" in entry.target]
    assert len(experts) == 2 and report.graphs[0].ops_by_dtype["mxfp8"] > 2
    assert plain < 0.5 * first
    assert blocks / plain < 1.01
