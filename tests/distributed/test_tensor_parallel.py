"""Tensor-parallel programs in two processes, and in one: eager autocast on the same DTensors, bit for bit."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from parallel_programs import PROGRAMS
from parallel_runs import Values, by_autocast, by_fxamp, whole
from support.checks.exhaustive import each_once, exhaustive
from support.machines.ranks import asked_by, on_ranks
from torch.distributed.device_mesh import DeviceMesh

LOWERINGS = ("eager", "aot_eager")
#: Programs that only make sense on DTensors, without a form in one piece.
APART = ("layouts", "functions")
#: By default: weights by columns and rows, tokens spread over ranks, heads, and results that stay DTensors.
ALWAYS = ("attention", "mlp", "sequence", "layouts")
NAMES = exhaustive((*sorted(PROGRAMS.keys() - set(APART)), *APART), ALWAYS)

Runs = dict[str, Values]
Asked = tuple[str, str, bool]
"""The name of a program, the lowering, and whether the backward is scaled."""


def work(mesh: DeviceMesh, asked: Sequence[Asked]) -> Runs:
    runs: Runs = {}
    for name, lowering, scaled in asked:
        program, reference = PROGRAMS[name], f"{name} autocast {scaled}"
        if reference not in runs:
            runs[reference] = by_autocast(program, mesh, scaled)
        runs[f"{name} {lowering} {scaled}"] = by_fxamp(program, mesh, lowering, scaled)
    return runs


@pytest.fixture(scope="module", params=exhaustive([1, 2], always=[1]), ids=lambda ranks: f"{ranks} ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
    """On each rank, the runs that the selected tests ask for."""
    cases = asked_by(request)
    asked = {(parameters["name"], parameters["lowering"], parameters["scaled"]) for parameters in cases}
    return on_ranks(partial(work, asked=sorted(asked)), request.param, tmp_path_factory.mktemp("ranks"))


@each_once("name, lowering, scaled", NAMES, LOWERINGS, [False, True])
def test_like_eager_autocast_on_the_same_dtensors(ranks: list[Runs], name: str, lowering: str, scaled: bool) -> None:
    for runs in ranks:
        got, reference = runs[f"{name} {lowering} {scaled}"], runs[f"{name} autocast {scaled}"]
        assert got.keys() == reference.keys()
        for key, value in reference.items():
            assert (value is None) == (got[key] is None) == key.startswith("frozen"), key
            if value is None:
                continue
            (part, placements), (expected, expected_placements) = got[key], value
            assert placements == expected_placements and part.dtype == expected.dtype, key
            assert expected.isfinite().all() and torch.equal(part, expected), key


@each_once("name, lowering, scaled", NAMES[: -len(APART)], LOWERINGS, [False, True])  # the runs of the test above
def test_together_they_are_the_program_in_one_piece(ranks: list[Runs], name: str, lowering: str, scaled: bool) -> None:
    program = PROGRAMS[name]
    exact = by_autocast(program, None, False, dtype=torch.float64)
    alone = by_autocast(program, None, scaled)
    lower = torch.finfo(torch.float16 if scaled else torch.bfloat16).eps
    rows = [runs[f"{name} {lowering} {scaled}"] for runs in ranks]
    for key, value in exact.items():
        assert value is not None and alone[key] is not None
        true = value[0]
        # Autocast's own error, and one more rounding of every part that the sum over ranks is made of.
        allowed = 2 * (alone[key][0] - true).norm() + lower * true.norm()
        assert (whole(rows, key, true.shape) - true).norm() <= allowed, key
