"""The reader of AMD's machine code: waits, branches, and code that the compiler merged from whole blocks and others."""

import pytest

pytest.importorskip("triton", reason="machine code needs triton's compiler")

from test_kernel_count import TEXT

from fxamp.tools.bench.cost.kernels.amdgcn import read_binary
from fxamp.tools.bench.cost.kernels.instruction import Binary, Unit
from fxamp.tools.bench.cost.kernels.sections import Section, _looping, by_section, sections

#: Blocks in an order of LLVM's: both kinds of block load, and then go on in one code, which has line 0; a jump forwards
#: and back is no loop.
LOOP = """\
	s_load_dword s2, s[0:1], 0x0
	.loc	1 2 5 prologue_end ; kernel_0.py:2:5
	s_waitcnt lgkmcnt(0)
	s_branch .LBB0_2
.LBB0_1:
	.loc	1 3 5 ; kernel_0.py:3:5
	s_cbranch_scc0 .LBB0_6
.LBB0_2:
	.loc	1 5 9 ; kernel_0.py:5:9
	s_cbranch_scc1 .LBB0_4
	.loc	1 6 9 ; kernel_0.py:6:9
	buffer_load_dwordx4 v[0:3], v9, s[4:7], 0 offen
	s_branch .LBB0_5
.LBB0_4:
	.loc	1 8 9 ; kernel_0.py:8:9
	buffer_load_dword v0, v9, s[4:7], 0 offen
.LBB0_5:
	.loc	1 0 9 is_stmt 0 ; kernel_0.py:0:9
	s_waitcnt vmcnt(0)
	v_add_f32_e32 v0, v0, v1
	v_cvt_f32_f16_e32 v0, v0
	buffer_store_dwordx4 v[0:3], v9, s[8:11], 0 offen
	s_branch .LBB0_1
.LBB0_6:
	.loc	1 9 5 ; kernel_0.py:9:5
	s_cbranch_vccnz .LBB0_8
.LBB0_7:
	s_endpgm
.LBB0_8:
	global_store_dword v0, v1, s[0:1]
	s_branch .LBB0_7
.Lfunc_end0:
"""
FACTS = """
    .private_segment_fixed_size: 0
    .vgpr_count:     12
    .group_segment_fixed_size: 0
"""


def binary(code: str) -> Binary:
    return read_binary(code + FACTS, "kernel_0.py")


def opcodes(code: str) -> dict[Section, list[str]]:
    return {
        section: [one.opcode for one in own] for section, own in by_section(binary(code).blocks, sections(TEXT)).items()
    }


def test_what_both_kinds_of_block_run_counts_for_whole_ones() -> None:
    code = opcodes(LOOP)
    assert code[Section.PART] == ["buffer_load_dword"]
    assert [name for name in code[Section.WHOLE] if not name.startswith("s_")] == [
        "buffer_load_dwordx4",
        "v_add_f32_e32",
        "v_cvt_f32_f16_e32",
        "buffer_store_dwordx4",
    ]
    assert "s_load_dword" in code[Section.ONCE] and "global_store_dword" in code[Section.ONCE]


def test_an_unrolled_loop_is_counted_whole() -> None:
    unrolled = LOOP.replace("s_branch .LBB0_1\n", "s_branch .LBB0_6\n")
    assert opcodes(unrolled)[Section.WHOLE] == [
        "buffer_load_dwordx4",
        "s_branch",
        "s_waitcnt",
        "v_add_f32_e32",
        "v_cvt_f32_f16_e32",
        "buffer_store_dwordx4",
        "s_branch",
    ]


def test_waits_for_memory_are_read() -> None:
    code = [instruction for block in binary(LOOP).blocks for instruction in block.instructions]
    assert [one.waits for one in code if one.waits] == [(("lgkmcnt", 0),), (("vmcnt", 0),)]
    assert [one.unit for one in code if one.opcode.startswith("v_")] == [Unit.FP32, Unit.CONVERSION]


def test_only_what_can_come_back_loops() -> None:
    """Code after the loop that jumps to the end and back, as LLVM lays it out, is no loop."""
    blocks = binary(LOOP).blocks
    assert [block.jump for block in blocks if not block.falls] == [".LBB0_2", ".LBB0_5", ".LBB0_1", "", ".LBB0_7"]
    looping = [blocks[at].label for at in sorted(_looping(blocks)) if blocks[at].label]
    assert looping == [".LBB0_1", ".LBB0_2", ".LBB0_4", ".LBB0_5"]
