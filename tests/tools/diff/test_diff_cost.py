"""``fxamp-diff --graph MODEL.py --cost``: the counts of both policies, in every format."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fxamp.tools.bench.cost import command
from fxamp.tools.diff import cost
from fxamp.tools.diff.command import main

MODEL = "import torch\n\nmodel = torch.relu\ninputs = (torch.ones(2),)\n"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file whose counts are made up; what the command is asked for is checked by its own parser."""

    def made_up(arguments: Sequence[str]) -> str:
        options = command.parser("fxamp-bench cost").parse_args(arguments)
        row = {"policies": options.policy, "dtype": options.dtype}
        return json.dumps(row) if options.json else f"| {row} |" if options.markdown else f"counted {row}"

    monkeypatch.setattr(cost, "run_command", made_up)
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


def test_every_format_has_the_facts_of_the_command(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    policies = ["cuda-float16", "cuda-float16-fast"]
    row = {"policies": policies, "dtype": "float16"}
    arguments = [*policies, "--graph", model, "--cost", "--format"]
    for style, expected in (("text", f"counted {row}"), ("markdown", f"| {row} |")):
        assert main([*arguments, style]) == 1
        assert expected in capsys.readouterr().out.splitlines()
    assert main([*arguments, "json"]) == 1
    assert json.loads(capsys.readouterr().out)["costs"] == [{"file": model, **row}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["cuda-float16", "cuda-bfloat16", "--cost"], "--cost needs a model: --graph MODEL.py"),
        (["cpu-float16", "cpu-bfloat16", "--cost", "--graph"], "--cost counts for GPUs: cpu-float16 is for cpu"),
    ],
)
def test_mistakes_are_one_line(
    model: str, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *([model] if arguments[-1] == "--graph" else [])]) == 2
    message = capsys.readouterr().err
    assert expected in message and message.count("\n") <= 2


def test_what_the_command_cannot_do_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        cost.OptionError,
        match=r"^--cost: fxamp-bench cost: .*nowhere.py does not exist; accepted: a Python file with model and inputs$",
    ):
        cost.run_command([str(tmp_path / "nowhere.py")])
