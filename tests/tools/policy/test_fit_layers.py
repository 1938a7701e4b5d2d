"""Layers of a model, and the bytes and kernels that each of them is counted with."""

from torch import nn

from fxamp.tools.bench.cost.count import Moment
from fxamp.tools.policy.fit.layers import as_of, by_scope, scopes, shortened


def test_layers_that_are_alike_are_one_with_first_and_last_apart() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))), nn.Linear(3, 1))
    names = [(part.name, part.modules, part.size) for part in scopes(net)]
    assert names == [
        ("first of 1", ("1.0",), 1),
        ("middle of 1", ("1.1", "1.2", "1.3"), 3),
        ("last of 1", ("1.4",), 1),
        ("rest", (".0", ".2"), 1),
    ]
    with shortened(net):
        assert [part.modules for part in scopes(net)][:3] == [("1.0",), ("1.1",), ("1.2",)] and len(net[1]) == 3
    assert len(net[1]) == 5
    (whole,) = scopes(nn.Linear(2, 2))
    assert whole.modules == ()


def test_bytes_in_use_are_those_of_the_part_that_runs_or_ran_before() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), nn.Linear(3, 1))
    forward = [Moment("forward", *one) for one in (("0", 1), ("1.0", 2), ("1.1", 5), ("1.1", 4), ("1.2", 6), ("2", 9))]
    moments = [*forward, Moment("backward", "2", 8), Moment("backward", "1.2", 7), Moment("backward", "0", 3)]
    assert by_scope(scopes(net), moments) == {
        "forward, after start": 1,
        "forward, first of 1": 2,
        "forward, after first of 1": 2,
        "forward, middle of 1": 5,
        "forward, after middle of 1": 4,
        "forward, last of 1": 6,
        "forward, after last of 1": 9,
        "backward, after last of 1": 8,
        "backward, last of 1": 7,
    }


def test_a_kernel_that_runs_while_other_layers_do_is_counted_with_these() -> None:
    net = nn.Sequential(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), nn.Linear(3, 1))
    forward = [
        ("0.0", 1),
        ("0.1", 2),
        ("0.0", 3),
        ("0.0", 4),
        ("0.1", 5),
        ("0.1", 5),
        ("0.2", 6),
        ("1", 9),
        ("0.0", 10),
    ]
    backward = [("1", 8), ("0.1", 9), ("0.2", 7), ("0.2", 6), ("0.1", 5), ("0.1", 4), ("0.0", 4)]
    moments = [Moment(stage, *one) for stage, own in (("forward", forward), ("backward", backward)) for one in own]
    assert by_scope(scopes(net), moments) == {
        "forward, after start": 0,
        "forward, first of 0": 4,
        "forward, after first of 0": 4,
        "forward, middle of 0": 5,
        "forward, after middle of 0": 5,
        "forward, last of 0": 6,
        "forward, after last of 0": 10,
        "backward, after last of 0": 9,
        "backward, last of 0": 7,
        "backward, middle of 0": 5,
        "backward, after middle of 0": 4,
        "backward, first of 0": 4,
        "backward, after first of 0": 4,
    }


def test_what_the_middle_adds_stands_for_first_and_last() -> None:
    parts = scopes(nn.Sequential(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))))
    order = [f"forward, {part} of 0" for part in ("first", "middle", "last")]
    order += ["forward, after last of 0", *(f"backward, {part} of 0" for part in ("last", "middle", "first"))]
    middle = dict(zip(order, (0, -1, -8, -9, -7, -6, 0), strict=True))
    first, own, last = (as_of(part, parts, middle) for part in parts)
    assert own == middle
    assert [first[name] for name in order] == [-1, -8, -8, -9, -7, -7, -6]
    assert [last[name] for name in order] == [0, 0, -1, -9, -6, 0, 0]
