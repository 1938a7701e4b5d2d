"""fxamp-bench finds its subcommands."""

import pytest

from fxamp.tools.bench import command as bench


@pytest.mark.parametrize("name", bench.SUBCOMMANDS)
def test_every_subcommand_has_a_parser_and_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main([name, "--help"])
    assert stop.value.code == 0 and f"usage: fxamp-bench {name}" in capsys.readouterr().out
