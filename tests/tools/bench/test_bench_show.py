"""fxamp-bench show on tiny dumps: real runs of fxamp-show, and counts that fit together."""

import json
from pathlib import Path

import pytest

from fxamp.errors import FxampError
from fxamp.listing import Entry, Listing
from fxamp.listing.parse import parse_text
from fxamp.listing.write import write_listing
from fxamp.tools.bench import command as bench
from fxamp.tools.bench import show as bench_show
from fxamp.tools.bench.show import Reading, chain_listing, per_node, smallest, time_show


def test_the_dump_holds_the_ops_that_were_asked_for() -> None:
    listing = chain_listing(20)
    assert sum(entry.is_call and not entry.is_cast for entry in listing.entries) == 20
    assert any(entry.is_cast for entry in listing.entries)
    assert parse_text(write_listing(listing), "dump.py").graphs == (listing,)


def test_it_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["show", "--sizes", "8,24", "--format", "json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == bench_show.RUNS and found["start"]["nodes"] == 1
    first, second = found["dumps"]
    assert (first["ops"], second["ops"]) == (8, 24)
    for dump in (first, second):
        assert dump["nodes"] == len(chain_listing(dump["ops"]).entries) > dump["ops"]
        assert dump["bytes"] == len(write_listing(chain_listing(dump["ops"])).encode())
        assert dump["cpu"] > 0 and dump["seconds"] > 0
        assert dump["per_node"] == max(0.0, dump["seconds"] - found["start"]["seconds"]) / dump["nodes"]


def test_the_table_begins_with_the_start() -> None:
    start, reading = Reading(1, 1, 99, 0.25, 0.2), Reading(10, 20, 5_000_000, 1.25, 1.0)
    assert per_node(reading, start) == 0.05 and per_node(start, reading) == 0.0
    _, _, first, second = bench_show.table(start, [reading]).splitlines()
    assert first.split() == ["1", "1", "0.00", "MB", "0.25", "s", "0.20", "s"]
    assert second.split() == ["10", "20", "5.00", "MB", "1.25", "s", "1.00", "s", "50000", "us"]


def test_a_dump_that_cannot_be_shown_is_no_measurement(tmp_path: Path) -> None:
    assert time_show(smallest(), 1, tmp_path, "text").nodes == 1
    broken = Listing("GraphModule", (Entry("a", "call_function", "f", "f("),))
    with pytest.raises(FxampError, match=r"status 2: fxamp-show: .*graph_2\.py:\d+: not the text of a graph"):
        time_show(broken, 2, tmp_path, "text")


@pytest.mark.parametrize(("given", "named"), [("--formt", "'--format'"), ("--format=jsn", "'json'")])
def test_a_wrong_option_is_one_clear_message(given: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["show", given])
    assert named in capsys.readouterr().err
