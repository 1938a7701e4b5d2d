"""fxamp-bench on tiny sizes: the numbers fit together, and wrong options are refused."""

import json
from collections import Counter

import pytest
import torch
from torch._ops import OpOverload

from fxamp.capture import capture
from fxamp.passes.sequences import FORWARD
from fxamp.tools.bench import command as bench
from fxamp.tools.bench.passes import command as bench_passes
from fxamp.tools.bench.passes.chain import build_chain
from fxamp.tools.bench.passes.growth import Timing, growth, time_chain
from fxamp.tools.bench.passes.share import time_compile


def test_a_chain_has_the_ops_that_were_asked_for_and_is_deep() -> None:
    chain = build_chain(40)
    captured = capture(chain.module, chain.inputs).module
    ops = [node for node in captured.graph.nodes if isinstance(node.target, OpOverload)]
    assert len(ops) == chain.ops == 40
    kinds = Counter(node.target.overloadpacket for node in ops if isinstance(node.target, OpOverload))
    assert {torch.ops.aten.linear, torch.ops.aten.layer_norm, torch.ops.aten.softmax} <= set(kinds)
    depth = {ops[0]: 0}
    for node in ops[1:]:
        depth[node] = 1 + max(depth.get(source, -1) for source in node.all_input_nodes)
    assert depth[ops[-1]] == 39


def test_timings_name_every_pass_and_add_up() -> None:
    timing = time_chain(48)
    assert list(timing.seconds) == ["capture", *(step.name for step in FORWARD.steps), "all passes"]
    assert timing.seconds["all passes"] == pytest.approx(sum(timing.seconds[step.name] for step in FORWARD.steps))
    assert timing.seconds["capture"] > 0 and timing.casts > 0


def test_growth_compares_time_per_op() -> None:
    first, last = Timing(10, 0, {"a": 1.0, "b": 1.0}), Timing(100, 0, {"a": 10.0, "b": 100.0})
    assert growth([first, last]) == {"a": 1.0, "b": 10.0}


def test_fxamps_share_of_a_compile_is_a_part_of_it() -> None:
    share = time_compile(1, lowering="eager")
    torch._dynamo.reset()
    assert share.capture + share.passes < share.own < share.total
    assert share.own_share == share.own / share.total
    assert share.graphs >= 1 and share.ops > share.casts > 0


def test_passes_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["passes", "--sizes", "16,32", "--model-layers", "0"]
    assert bench.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [chain["ops"] for chain in document["chains"]] == [16, 32]
    seconds = [chain["seconds"]["insert-casts"] for chain in document["chains"]]
    assert document["growth"]["insert-casts"] == pytest.approx(seconds[1] / 32 / (seconds[0] / 16))
    assert document["compile"] is None
    assert bench.main(arguments) == 0
    assert "us/op, 32 to 16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["pases"], "'passes'"),
        ([], "usage"),
        (["passes", "--size", "10"], "'--sizes'"),
        (["passes", "--sizes", "10,x"], "'x'"),
        (["passes", "--model-layers", "-1"], "-1"),
    ],
)
def test_a_wrong_option_is_one_clear_message(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = bench.main(arguments)
    except SystemExit as stop:
        status = int(str(stop.code))
    printed, message = capsys.readouterr()
    assert status == 2 and named in message and not printed


def test_the_share_table_shows_parts_of_the_whole() -> None:
    share = bench_passes.Share(12, 2, 548, 171, total=100.0, own=3.0, capture=2.0, passes=1.0, lowering=80.0)
    text = bench_passes._share_table(share)
    assert "3.00%" in text and "80.00%" in text
