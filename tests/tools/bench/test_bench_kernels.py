"""fxamp-bench kernels on tiny sizes: the work is the same work, the bytes are the plan's, table and JSON agree."""

import json

import pytest
import torch

from fxamp.tools.bench import command as bench
from fxamp.tools.bench.kernels.work import cases, copied, make_gradients


@pytest.mark.parametrize(
    ("dtype", "ours", "theirs"),
    [(torch.float16, (6, 6), (14, 18)), (torch.bfloat16, (6, 6), (14, 18)), (torch.float32, (8, 8), (8, 12))],
)
def test_bytes_are_those_that_the_kernels_document(
    dtype: torch.dtype, ours: tuple[int, int], theirs: tuple[int, int]
) -> None:
    checked = [case for case in cases(5_000, dtype, "cpu") if case.our_bytes]
    assert tuple(case.our_bytes // 5_000 for case in checked) == ours
    assert tuple(case.their_bytes // 5_000 for case in checked) == theirs


def test_both_do_the_same_work() -> None:
    """The norm of the same gradients; fxamp's result is the sum of squares."""
    _, normed, update = cases(5_000, torch.float16, "cpu")
    *_, squares = normed.ours()
    gradients = make_gradients(5_000, torch.float16, "cpu")
    expected = sum(gradient.double().square().sum() for gradient in gradients)
    assert squares.double().item() == pytest.approx(float(expected), rel=5_000 * 2**-24)
    assert normed.theirs().double().square().item() == pytest.approx(float(expected), rel=5_000 * 2**-24)
    update.ours()
    update.theirs()


def test_gradients_hold_all_parameters_and_a_copy_moves_the_bytes() -> None:
    for count in (1, 7, 2_000, 5_001):
        assert sum(gradient.numel() for gradient in make_gradients(count, torch.float32, "cpu")) == count
    assert copied(8_000, "cpu")().nbytes == 4_000


def test_kernels_prints_json_or_a_table_and_says_who_did_the_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["kernels", "--sizes", "2000", "--rounds", "3", "--dtype", "float32"]
    before = torch.get_num_threads()
    assert bench.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert torch.get_num_threads() == before
    assert document["implementation"] == "host"
    assert [row["work"] for row in document["rows"]] == ["check, unscale", "check, unscale, norm", "scale update"]
    for row in document["rows"]:
        assert row["ratio"] == row["ours"]["median"] / row["theirs"]["median"]
        assert row["ours"]["low"] <= row["ours"]["median"] <= row["ours"]["high"]
    first = document["rows"][0]
    assert first["of_copy"] == first["copy"]["median"] / first["ours"]["median"]
    assert first["bandwidth"] == pytest.approx(8 * 2000 / first["ours"]["median"])
    assert bench.main(arguments) == 0
    assert "No Triton kernel ran" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--dtype", "float8"], "float"), (["--sizes", "0"], "'0'"), (["--devic", "cpu"], "'--device'")],
)
def test_a_wrong_option_is_one_clear_message(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(["kernels", *arguments])
    assert stop.value.code == 2 and named in capsys.readouterr().err
