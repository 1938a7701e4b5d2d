"""fxamp-bench kernels: sections of a generated text, bounds of made-up code, the command on one kernel."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="machine code needs triton's compiler")

from fxamp.tools.bench import command as bench
from fxamp.tools.bench.cost.kernels import subjects as subjects_module
from fxamp.tools.bench.cost.kernels.bound import bound
from fxamp.tools.bench.cost.kernels.count import Count, count
from fxamp.tools.bench.cost.kernels.devices import DEVICES, LOADED
from fxamp.tools.bench.cost.kernels.instruction import Binary, Block, Instruction, Unit
from fxamp.tools.bench.cost.kernels.sections import Section, by_section, sections
from fxamp.tools.bench.cost.kernels.subjects import Program, Subject

(H100,) = [device for device in DEVICES if device.name == "H100"]
TEXT = """\
def kernel():
    first = 1
    for start in range(0, 64, 32):
        offsets = start
        if start + 32 <= left:
            whole = 1
        elif start < left:
            part = 1
    last = 1
"""
LOAD = Instruction("LDG.E.128", 6, Unit.MEMORY, busy=4, width=16, signals=("barrier 0",), far=True)
USE = Instruction("FADD", 6, Unit.FP32, waits=(("barrier 0", 0),))


@pytest.mark.exhaustive
def test_the_count_is_of_its_own_text_not_of_an_equal_kernel_in_tritons_cache() -> None:
    (program,) = (one.program(32) for one in subjects_module.subjects() if one.name == "scale update")
    assert '"""' in program.text
    renamed = replace(program, text=program.text.replace('"""', '"""Another docstring. ', 1))
    codes = [count(one, "sm_90").code for one in (program, renamed)]
    assert codes[0] == codes[1] and any(codes[0].values())


def test_sections_are_recognized_by_indentation() -> None:
    names = [section.value for section in sections(TEXT).values()]
    assert names == ["once", "once", "loop", "loop", "loop", "whole", "loop", "part", "once"]


def test_a_block_belongs_where_most_of_it_comes_from_and_runs_once_outside_of_the_loop() -> None:
    def instructions(*lines: int) -> tuple[Instruction, ...]:
        return tuple(Instruction("MOV", line, Unit.OTHER) for line in lines)

    blocks = [
        Block(instructions(2, 4, 4)),
        Block(instructions(4, 3), label="loop"),
        Block(instructions(6, 6, 2)),
        Block(instructions(6, 6), cold=True),
        Block(instructions(8)),
        Block(instructions(3), jump="loop"),
        Block(instructions(9)),
    ]
    code = by_section(blocks, sections(TEXT))
    assert {section.value: len(own) for section, own in code.items()} == {"once": 4, "loop": 3, "whole": 3, "part": 1}


def count_of(whole: Sequence[Instruction], once: Sequence[Instruction] = (), registers: int = 32) -> Count:
    """A kernel that reads 16 bytes a lane and block, which are 4 elements of 4 bytes."""
    program = Program("kernel", TEXT, {}, 2, {"num_warps": 8}, block=1024)
    code = {Section.ONCE: tuple(once), Section.LOOP: (), Section.WHOLE: tuple(whole), Section.PART: ()}
    return Count(program, 256, Binary((), registers, 0, 0), 4.0, code)


def test_memory_is_the_limit_of_a_plain_read() -> None:
    result = bound(count_of([LOAD, USE]), H100)
    assert (result.share, result.limit, result.warps) == (1.0, "bandwidth", 64)


def test_instructions_limit_what_the_schedulers_can_issue() -> None:
    """128 lanes a clock issue for 4 elements at a time; the bandwidth carries 12.8 bytes a clock."""
    result = bound(count_of([LOAD, *[USE] * 199]), H100)
    assert result.shares["issue"] == pytest.approx(128 * 4 / 200 / (H100.bytes_a_clock / 4))
    assert result.share == min(result.shares.values()) < 1


def test_float64_once_a_program_limits_a_gpu_with_few_units_for_it() -> None:
    (ada,) = [device for device in DEVICES if device.arch == "sm_89"]
    once = [Instruction("DFMA", 2, Unit.FP64)] * 170
    limited = bound(count_of([LOAD, USE], once), ada).shares["FP64"]
    assert limited == pytest.approx(2 * 16384 / 256 / 170 / (ada.bytes_a_clock / 4))
    assert bound(count_of([LOAD, USE], once), H100).shares["FP64"] > limited
    assert bound(count_of([LOAD, USE]), ada).shares["FP64"] == float("inf")


def test_registers_limit_the_bytes_in_flight() -> None:
    """16 warps, 2 programs, each of which waits for memory once a block."""
    result = bound(count_of([LOAD, USE], registers=120), H100)
    assert result.warps == 16
    once = 16384 / (8 * 128) * (H100.far * LOADED + 1)
    assert result.shares["bytes in flight"] == pytest.approx(2 * 16384 / once / (H100.bytes_a_clock / 4), rel=0.01)


def test_loads_that_are_waited_for_together_answer_together() -> None:
    apart = bound(count_of([LOAD, USE, LOAD, USE]), H100).shares["bytes in flight"]
    together = bound(count_of([LOAD, LOAD, USE, USE]), H100).shares["bytes in flight"]
    assert together == pytest.approx(2 * apart, rel=0.02)


def test_a_store_is_waited_for_until_its_operands_are_read() -> None:
    """So a block of two accesses takes as long as one of one, whichever of them is waited for."""
    plain = 2 * bound(count_of([LOAD, USE]), H100).shares["bytes in flight"]
    store = Instruction("STG.E.128", 6, Unit.MEMORY, busy=4, width=16, reads=("barrier 0",), far=True)
    assert bound(count_of([LOAD, USE, store, USE]), H100).shares["bytes in flight"] == pytest.approx(plain, rel=0.05)
    assert bound(count_of([LOAD, store, USE]), H100).shares["bytes in flight"] == pytest.approx(plain, rel=0.01)


def test_the_command_prints_a_table_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one() -> list[Subject]:
        return [Subject("scale update", True, 0.0, lambda wave: subjects_module._update())]

    monkeypatch.setattr(subjects_module, "subjects", one)
    arguments = ["kernels", "--arch", "sm_90"]
    assert bench.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["device"] for row in document["rows"]} == {"H100", "H200"}
    assert all(row["registers"] > 0 and row["spills"] == 0 and row["bound"] is None for row in document["rows"])
    assert bench.main(arguments) == 0
    assert "scale update" in capsys.readouterr().out
