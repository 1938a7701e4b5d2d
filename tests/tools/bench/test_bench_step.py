"""fxamp-bench step on a few parameters: who compiles, what is printed, and that all make the same step."""

import json
import math

import pytest
import torch

from fxamp.optim import guarded
from fxamp.tools.bench import command as bench
from fxamp.tools.bench.step.command import NAMES
from fxamp.tools.bench.step.contenders import CONTENDERS
from fxamp.tools.bench.step.setup import Setup

SETUP = Setup(6, 1, "cpu", 1, "aot_eager")


def test_148_parameters_of_768_are_gpt_2s() -> None:
    shapes = Setup(148, 768, "cpu", 1, "inductor").shapes()
    assert len(shapes) == 148 and sum(map(math.prod, shapes)) == 124_439_808


@pytest.mark.exhaustive
def test_a_contender_runs_in_a_process_and_says_what_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--parameters 6 --width 1 --contenders fxamp --rounds 2 --steps 1 --lowering aot_eager"
    assert bench.main(["step", *options.split(), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["name"], row["parameters"], row["failed"], row["first"]) == ("fxamp", 6, "", None)
    assert row["compiling"] > 0 < row["compiling_cpu"]
    assert len(row["steps"]) == 2 and min(row["steps"]) > 0


def test_all_make_the_same_step() -> None:
    ends = {}
    for name in NAMES:
        torch._dynamo.reset()
        own = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in SETUP.shapes()[1:]]
        step = CONTENDERS[name].make(own, SETUP)
        for _ in range(3):
            for parameter in own:
                parameter.grad = torch.full_like(parameter, 0.25)
            step()
        ends[name] = own
        if name == "fxamp":
            assert guarded(step.__self__, "aot_eager").compilations == 1  # type: ignore[attr-defined]
    for name in NAMES[1:]:
        for one, other in zip(ends[name], ends[NAMES[0]], strict=True):
            torch.testing.assert_close(one, other, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


def test_a_contender_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fxamp.tools.bench.step.measure.WORKER", "fxamp.no_such_worker")
    assert bench.main(["step", "--parameters", "6", "--contenders", "fused", "--markdown"]) == 1
    printed = capsys.readouterr().out
    assert "| failed" in printed and "fused failed: its process ended: status 1" in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--contenders", "fussed"], "(did you mean 'fused'?)"),
        (["--parameters", "0"], "'0' is not a whole number of 1 or more"),
        (["--lowering", "eager"], "'eager'"),
        pytest.param(
            ["--device", "cuda"],
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_a_wrong_option_is_one_clear_message(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = bench.main(["step", *arguments])
    except SystemExit as stop:
        status = int(str(stop.code))
    printed, message = capsys.readouterr()
    assert status == 2 and named in message and not printed and message.count("\n") == 1
