"""fxamp-policy check asks the installed torch for the ops that rules name."""

from pathlib import Path

import pytest

from fxamp.policy import built_in_names, variant_names
from fxamp.tools.policy import check
from fxamp.tools.policy.command import main

RULE = '[[rule]]\nid = "a"\ncast = "fp32"\nops = [\n"exp",\n"{}"]\n'
HEAD = 'extends = ["cpu-bfloat16"]\n'


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, *more: str) -> tuple[int, str, str]:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    status = main(["check", str(file), *more])
    out, err = capsys.readouterr()
    return status, out.replace(str(file), "mine.toml"), err.replace(str(file), "mine.toml")


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("aten::linearr", "the installed torch has no op 'aten::linearr' (did you mean 'aten::linear'?)"),
        ("linearr", "the installed torch has no op 'aten::linearr' (did you mean 'aten::linear'?)"),
        (
            "sum.dim_IntLst",
            "the installed torch has no op 'aten::sum.dim_IntLst' (did you mean 'aten::sum.dim_IntList'?)",
        ),
        ("quantized::ad", "the installed torch has no op 'quantized::ad' (did you mean 'quantized::add'?)"),
        ("linearr*", "'aten::linearr*' covers no op of the installed torch"),
    ],
)
def test_an_op_that_does_not_exist_is_a_mistake_at_its_line(
    op: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, capsys, HEAD + RULE.format(op)) == (1, f"mine.toml:7: {message}\n", "")
    table = RULE.format(op)
    assert run(tmp_path, capsys, table, "--part") == (1, f"mine.toml:6: {message}\n", "")


@pytest.mark.parametrize("op", ["linear", "sum.dim_IntList", "mm.default", "conv*", "higher_order::cond", "*::add*"])
def test_an_op_that_exists_is_none(op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, capsys, HEAD + RULE.format(op)) == (0, "mine.toml: no mistakes\n", "")


def test_an_unknown_library_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(tmp_path, capsys, HEAD + RULE.format("mylib::op"))
    assert (status, out) == (0, "mine.toml: no mistakes\n")
    assert err == (
        "fxamp-policy check: mine.toml:7: 'mylib::op' was not looked up: no library 'mylib' is loaded here\n"
    )


def test_ops_of_other_versions_of_torch_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = HEAD + RULE.format("linearr")
    assert run(tmp_path, capsys, text + 'torch = "<2.0"\n')[0] == 0
    assert run(tmp_path, capsys, text + 'torch = ">=2.0"\n')[0] == 1


ARGUMENTS = '[[rule]]\nid = "a"\ncast = "fp32"\nops = ["mm", "addmm"]\n{}\n'


@pytest.mark.parametrize(
    ("conditions", "line", "message"),
    [
        ("args = { sefl = 1 }", 6, "args names 'sefl', but aten::mm and aten::addmm have no such argument; accepted: "),
        ("args.self = { rank = 2 }\nargs.nosuch = 1", 7, "args names 'nosuch', but aten::mm and aten::addmm have no"),
        ('inputs = { nosuch = "fp32" }', 6, "inputs names 'nosuch', but aten::mm and aten::addmm have no such"),
    ],
)
def test_an_argument_that_no_op_of_the_rule_has_is_a_mistake(
    conditions: str, line: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(tmp_path, capsys, HEAD + ARGUMENTS.format(conditions))
    assert (status, err) == (1, "") and out.startswith(f"mine.toml:{line}: {message}")
    assert run(tmp_path, capsys, HEAD + ARGUMENTS.format(f'torch = "<2.0"\n{conditions}'))[0] == 0


@pytest.mark.parametrize("conditions", ["args.mat2 = { rank = 2 }", 'inputs = { beta = "fp32" }'])
def test_an_argument_of_one_op_of_the_rule_is_none(
    conditions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, capsys, HEAD + ARGUMENTS.format(conditions)) == (0, "mine.toml: no mistakes\n", "")


@pytest.mark.parametrize(
    "condition",
    ['reduces = ">10,<5"', 'reduces = ">7,<8"', 'reduces = "<0"', 'torch = ">=3,<2"', 'torch = ">2.13,<2.14"'],
)
def test_a_condition_that_no_number_meets_is_a_mistake(
    condition: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = condition.partition(" = ")[2].strip('"')
    status, out, _ = run(tmp_path, capsys, HEAD + ARGUMENTS.format(condition))
    assert status == 1 and f"mine.toml:6: no number meets {text!r}; accepted: " in out


@pytest.mark.parametrize(
    "condition",
    ['reduces = ">=8,<=8"', 'reduces = ">7,<9,%8"', 'reduces = "%8"', 'torch = ">=2.13,<2.13.1"', 'torch = ">=2,<=2"'],
)
def test_a_condition_that_one_number_meets_is_none(
    condition: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, capsys, HEAD + ARGUMENTS.format(condition))[0] == 0


def test_readers_of_kept_values_are_looked_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = '[[rule]]\nid = "a"\nregion = "kept"\nkeep = "int8"\nops = ["exp"]\nread_by = ["linearr"]\n'
    status, out, _ = run(tmp_path, capsys, HEAD + rule)
    assert status == 1 and out.startswith("mine.toml:7: the installed torch has no op 'aten::linearr'")


def test_the_shipped_policies_name_ops_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *built_in_names(), *variant_names()]) == 0, capsys.readouterr().out


def test_without_torch_nothing_is_looked_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "find_spec", lambda _: None)
    status, out, err = run(tmp_path, capsys, HEAD + RULE.format("linearr"))
    assert (status, out) == (0, "mine.toml: no mistakes\n") and "names of ops were not looked up" in err
