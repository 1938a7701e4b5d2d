"""fxamp-bench finds its subcommands, and answers what is none."""

import pytest

from fxamp.tools.bench import command as bench


@pytest.mark.parametrize("name", bench.SUBCOMMANDS)
def test_every_subcommand_has_a_parser_and_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main([name, "--help"])
    assert stop.value.code == 0 and f"usage: fxamp-bench {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["optimizers", "passes", "show", "all"])
def test_what_is_no_subcommand_is_answered_by_another(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([name, "--json"]) == 2
    message = capsys.readouterr().err
    assert repr(name) in message and "fxamp-" in message and message.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"), [([], "usage"), (["polices"], "'policies'"), (["kernels", "--devic", "x"], "'--devic'")]
)
def test_a_wrong_call_is_one_clear_message(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = bench.main(arguments)
    except SystemExit as stop:
        status = int(str(stop.code))
    printed, message = capsys.readouterr()
    assert status == 2 and named in message and not printed
