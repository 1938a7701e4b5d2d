"""``fxamp-show`` on dumps: fxamp's own, with all its records, and torch's."""

from pathlib import Path

import pytest
from show_samples import gpt, plain

from fxamp.listing import Listing
from fxamp.listing.write import write_listing
from fxamp.tools.show.command import main
from fxamp.tools.show.json_format import from_json

ROOT = Path(__file__).parents[3]


def dumped(path: Path, listing: Listing) -> str:
    path.write_text(write_listing(listing), encoding="utf-8")
    return str(path)


def test_a_dump_of_fxamp_shows_all_that_was_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([dumped(tmp_path / "dump.py", gpt()), "--format", "json"]) == 0
    (graph,) = from_json(capsys.readouterr().out).graphs
    assert [entry.name for _, entry in graph.walk()] == [entry.name for _, entry in gpt().walk()]
    assert [entry.rule for entry in graph.entries] == [entry.rule for entry in gpt().entries]
    assert graph.kept_before == 4096 and graph.ended == gpt().ended


def test_a_dump_of_torch_says_how_to_learn_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([dumped(tmp_path / "dump.py", plain())]) == 0
    assert "--policy NAME shows what one would do" in capsys.readouterr().out
