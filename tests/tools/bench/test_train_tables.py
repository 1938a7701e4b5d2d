"""What fxamp-bench train makes of measurements: one table of all models, the picture, and what Ctrl-C leaves."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from support.checks.commands import mistake

from fxamp.tools.bench import command as bench
from fxamp.tools.bench.models import EVERY
from fxamp.tools.bench.process import Process
from fxamp.tools.bench.train import measure
from fxamp.tools.bench.train.experiment import Experiment
from fxamp.tools.bench.train.result import Comparison, Measured
from fxamp.tools.bench.train.table import table
from fxamp.tools.bench.train.turns import Runner

_MEMORY = {"memory_how": "a count", "memory_peak": 3e6}


def _compared(experiment: Experiment, names: Sequence[str], baseline: str, say: Any) -> Comparison:
    """A measurement: each contender takes 1.25 times as long as the one before it, and half of its memory."""
    contenders = tuple(
        Measured(
            name,
            experiment.contenders[name].label,
            seconds=((0.2 * 1.25**at,), (0.2 * 1.25**at,)),
            losses=(1.0,),
            gradient_error=1e-3 * (at + 1),
            observed={**_MEMORY, "memory_step": 8e6 / 2**at},
        )
        for at, name in enumerate(names)
    )
    facts = {"device": "a machine", "torch": "2", "load": "0.1"}
    return Comparison(experiment, facts, baseline, "compile-float32", contenders)


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "compare", _compared)


def test_every_has_a_row_for_each_model_and_a_column_for_each_kind_of_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.main(["train", "--every", "--size", "tiny", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    kinds = ["cpu-bfloat16", "cpu-bfloat16-fast", "cpu-bfloat16-lean", "cpu-bfloat16-leanest"]
    others = ["torch.compile float32", "torch.compile + autocast"]
    assert rows[0] == ["", *others, *(f"fxamp {kind}" for kind in kinds)]
    assert [row[0] for row in rows[2:]] == [f"`{model}`" for model in EVERY]
    ratios = ["1.25 / 0.50 / 1.50", "1.56 / 0.25 / 2.00", "1.95 / 0.12 / 2.50", "2.44 / 0.06 / 3.00"]
    assert rows[2][1:] == ["0.80 / 2.00 / 0.50", "250 ms / 4 MB / 2.0e-03", *ratios]
    assert "Measured on a machine, 20" in "\n".join(lines) and "busy" not in "\n".join(lines)


def test_every_has_so_many_layers_or_stages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = []

    def compared(experiment: Experiment, *others: Any) -> Comparison:
        changes.append(dict(experiment.changed))
        return _compared(experiment, *others)

    monkeypatch.setattr(measure, "compare", compared)
    assert bench.main(["train", "--every", "--size", "tiny", "--layers", "3", "--markdown"]) == 0
    assert changes == [{"layers": 3}] * 4 + [{"depth": 3}]
    assert "Size tiny, 3 layers or stages, AdamW; " in capsys.readouterr().out


def test_only_a_gpu_has_a_column_for_the_host() -> None:
    comparison = _compared(Experiment("mlp", "tiny", "cuda"), ["fxamp"], "fxamp", None)
    assert "host, ms" not in table(comparison)
    timed = replace(comparison.contenders[0], host_seconds=((0.004, 0.002), (0.003,)))
    comparison = replace(comparison, contenders=(timed,))
    assert "host, ms" not in table(replace(comparison, experiment=Experiment("mlp", "tiny", "cpu")))
    lines = table(comparison, markdown=True).splitlines()
    head, values = ([cell.strip() for cell in line.split("|")] for line in (lines[2], lines[4]))
    assert values[head.index("host, ms")] == "3"


@pytest.mark.parametrize(("native", "size", "baseline"), [(True, "small", "autocast"), (False, "tiny", "float32")])
def test_what_is_usual_depends_on_the_cpu(
    native: bool, size: str, baseline: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxamp.torch_devices.native_bfloat16", lambda device: native)
    assert bench.main(["train"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.startswith(f"mlp ({size}), ") and f"Ratios are to torch.compile {'+ ' * native}{baseline}." in printed
    )


def test_a_chart_has_every_contender_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mlp.svg"
    assert bench.main(["train", "--size", "tiny", "--policy", "cpu-bfloat16-fast", "--chart", str(file)]) == 0
    texts = {element.text for element in ET.fromstring(file.read_text()).iter() if element.text}
    assert {"torch.compile float32", "torch.compile + autocast", "fxamp cpu-bfloat16-fast", "mlp (tiny)"} <= texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--policy cpu-bflot16", "no policy is named 'cpu-bflot16' (did you mean 'cpu-bfloat16'?)"),
        ("--policy cuda-bfloat16", "is for device 'cuda'"),
        (
            "--policy cpu-bfloat16 --baseline eager-float32",
            "--baseline eager-float32 is not one of the contenders: compile-",
        ),
        ("--every --model mlp", "--model is for one model; accepted with --every: --policy, "),
        ("--every --chart x.svg", "--chart is for one model"),
        ("--chart no/where.svg", "--chart 'no/where.svg': there is no folder"),
        ("--size smal", "'smal' is unknown (did you mean 'small'?)"),
    ],
)
def test_a_mistake_is_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in mistake(bench.main, ["train", *line.split()], capsys)


def test_a_chart_without_matplotlib_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxamp.tools.common.charts.available", lambda: False)
    assert "pip install matplotlib" in mistake(bench.main, ["train", "--chart", "x.svg"], capsys)


def test_ctrl_c_between_a_call_and_its_answer_does_not_shift_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    load = pickle.load

    def interrupted(stream: Any) -> None:
        monkeypatch.setattr(pickle, "load", load)
        raise KeyboardInterrupt

    with Process(list, "ab") as process:
        monkeypatch.setattr(pickle, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.ask(len)
        assert process.ask(str) == "['a', 'b']"


class _Steps:
    """A process whose contender steps in a second, until Ctrl-C in the ``last`` turn."""

    def __init__(self, last: int) -> None:
        self.turns, self.last = 0, last

    def ask(self, task: Any, **_: Any) -> dict[str, Any]:
        if task.__name__ == "steps":
            self.turns += 1
            if self.turns == self.last:
                raise KeyboardInterrupt
        return {"seconds": 1.0, "cpu": 1.0}


@pytest.mark.parametrize(("last", "rounds"), [(4, [3]), (6, [3, 1])])
def test_ctrl_c_in_a_later_start_leaves_whole_rounds(
    last: int, rounds: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    experiment = replace(Experiment("mlp", "tiny", "cpu"), rounds=3, starts=2)
    runner, process = Runner("fxamp"), _Steps(last if last == 4 else 5)
    monkeypatch.setattr(measure, "Process", lambda *_, **__: _Context(process))
    whole = [measure._start([runner], at, experiment, tmp_path, None, lambda _: None) for at in range(2)]
    assert whole == [True, False] and [len(start) for start in runner.rounds] == rounds


class _Context(_Steps):
    """The process as a context manager."""

    def __init__(self, process: _Steps) -> None:
        self.process = process

    def __enter__(self) -> _Steps:
        return self.process

    def __exit__(self, *_: object) -> None:
        pass
