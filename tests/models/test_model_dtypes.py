"""The ops that execute, forward and backward, have the dtypes that eager autocast gives them."""

from collections import Counter
from collections.abc import Iterable

import torch
from allowed_differences import ALLOWED, OTHER_KERNELS, REORDERED_BACKWARD
from executed_ops import Op
from model_runs import Baseline, Compiled

#: How eager autocast ran an op, and how fxamp did.
Pair = tuple[Op, Op]


def test_the_ops_run_in_the_dtypes_of_eager_autocast(base: Baseline, eager: Compiled) -> None:
    other = OTHER_KERNELS.get(base.name, frozenset())
    pairs = _in_order(_without(base.ops.forward, other), _without(eager.ops.forward, other))
    pair = _by_kind if base.name in REORDERED_BACKWARD else _in_order
    pairs += pair(_without(base.ops.backward, other), _without(eager.ops.backward, other))
    differences = Counter((str(theirs), str(ours)) for theirs, ours in pairs if theirs != ours)
    assert differences == _allowed(base.name)
    assert all(_at_least_as_wide(theirs, ours) for theirs, ours in pairs)


def test_some_ops_run_in_bfloat16(base: Baseline, eager: Compiled) -> None:
    ran = {op.name.partition(".")[0] for op in eager.ops.forward if set(op.dtypes) == {torch.bfloat16}}
    assert ran & {"mm", "bmm", "addmm", "convolution", "mkldnn_convolution"}


def test_other_kernels_run_in_float32_on_both_sides(base: Baseline, eager: Compiled) -> None:
    names = OTHER_KERNELS.get(base.name, frozenset())
    for ops in (base.ops, eager.ops):
        ran = [op for op in (*ops.forward, *ops.backward) if op.name in names]
        assert bool(ran) == bool(names)
        assert all(set(op.dtypes) == {torch.float32} for op in ran)


def _allowed(name: str) -> Counter[tuple[str, str]]:
    allowed: Counter[tuple[str, str]] = Counter()
    for one in ALLOWED.get(name, ()):
        allowed[one.autocast, one.fxamp] += one.count
    return allowed


def _without(ops: Iterable[Op], names: frozenset[str]) -> list[Op]:
    return [op for op in ops if op.name not in names]


def _in_order(theirs: list[Op], ours: list[Op]) -> list[Pair]:
    assert [op.name for op in theirs] == [op.name for op in ours]
    return list(zip(theirs, ours, strict=True))


def _by_kind(theirs: list[Op], ours: list[Op]) -> list[Pair]:
    """Ops of equal dtypes are pairs; the rest are paired, by name, in the order in which they ran."""
    common = Counter(theirs) & Counter(ours)
    left, right = _beyond(theirs, common), _beyond(ours, common)
    return _in_order(sorted(left, key=lambda op: op.name), sorted(right, key=lambda op: op.name))


def _beyond(ops: list[Op], common: Counter[Op]) -> list[Op]:
    counts: Counter[Op] = Counter()
    rest = []
    for op in ops:
        counts[op] += 1
        if counts[op] > common[op]:
            rest.append(op)
    return rest


def _at_least_as_wide(theirs: Op, ours: Op) -> bool:
    return all(a.itemsize <= b.itemsize for a, b in zip(theirs.dtypes, ours.dtypes, strict=True))
