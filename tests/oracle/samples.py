"""A sample call of every op that torch registers for autocast, and the variants of it that a policy is tested with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from oracle import samples_math, samples_more
from oracle.specs import Sample, Spec

SAMPLES: dict[str, Sample] = {f"aten::{name}": s for name, s in (samples_math.SAMPLES | samples_more.SAMPLES).items()}

NO_SHAPES = {
    "aten::_cudnn_rnn",
    "aten::_grid_sampler_2d_cpu_fallback",
    "aten::_mps_convolution",
    "aten::_thnn_fused_gru_cell",
    "aten::cudnn_convolution",
    "aten::cudnn_convolution_transpose",
    "aten::linalg_lstsq",
    "aten::nanquantile",
    "aten::nanquantile.scalar",
    "aten::quantile",
    "aten::quantile.scalar",
}
"""Ops whose ``out=`` call is not tried: on some torch no fake kernel tells the shape that ``out`` must have."""


@dataclass(frozen=True)
class Variant:
    """One call to try: an overload, its arguments' dtypes, and what is special about it."""

    label: str
    op: OpOverload
    sample: Sample
    dtypes: tuple[torch.dtype, ...]

    def build(self, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments, made in the ambient FakeTensorMode."""
        return self.sample.build(self.dtypes, device)


def overload(name: str) -> OpOverload:
    """Return the overload of a registered name: ``"aten::mm"``, ``"aten::sum.dim_IntList"``."""
    packet, _, which = name.removeprefix("aten::").partition(".")
    op: OpOverload = getattr(getattr(torch.ops.aten, packet), which or "default")
    return op


def samples(name: str, lower: torch.dtype) -> Iterator[Variant]:
    """Yield every variant of the sample call of a registered op, for a policy whose 16-bit dtype is ``lower``.

    Raises KeyError if the op has no sample.
    """
    op, sample = overload(name), SAMPLES[name]
    other = torch.bfloat16 if lower is torch.float16 else torch.float16
    for label, dtypes in _mixtures(sample.floats(), lower, other):
        yield Variant(label, op, sample, dtypes)
    if any(argument.name == "dtype" for argument in op._schema.arguments):
        for dtype in (torch.float64, torch.float32, lower):
            changed = Sample(sample.args, {**sample.kwargs, "dtype": dtype})
            yield Variant(f"dtype={dtype}", op, changed, (torch.float32,) * sample.floats())
            yield Variant(f"dtype={dtype} of {lower}", op, changed, (lower,) * sample.floats())
    yield from _mutating(op, sample, lower)


def _mixtures(count: int, lower: torch.dtype, other: torch.dtype) -> Iterator[tuple[str, tuple[torch.dtype, ...]]]:
    """Yield each way to give ``count`` floating inputs their dtypes: all the same, then each in turn another."""
    for dtype in (torch.float32, lower, other, torch.float64, torch.int64):
        yield f"all {dtype}", (dtype,) * count
    if count < 2:
        return
    for base, odd in (
        (torch.float32, lower),
        (lower, torch.float32),
        (torch.float32, other),
        (lower, other),
        (torch.float32, torch.float64),
    ):
        for at in range(count):
            dtypes = [base] * count
            dtypes[at] = odd
            yield f"{base} with {odd} at {at}", tuple(dtypes)


def _mutating(op: OpOverload, sample: Sample, lower: torch.dtype) -> Iterator[Variant]:
    """Yield the in-place and ``out=`` calls that the sample's arguments fit."""
    for label, mutating in (("in-place", _in_place(op)), ("out=", _out(op))):
        if mutating is None or (label == "out=" and op.name() in NO_SHAPES):
            continue
        shapes = _out_specs(op, mutating, sample)
        changed = Sample(sample.args, {**sample.kwargs, **shapes})
        extra = (lower,) * (changed.floats() - sample.floats())
        for dtype in (torch.float32, lower):
            yield Variant(f"{label} {dtype}", mutating, changed, (dtype,) * sample.floats() + extra)


def _in_place(op: OpOverload) -> OpOverload | None:
    packet = getattr(torch.ops.aten, f"{op.overloadpacket.__name__}_", None)
    mutating: OpOverload | None = getattr(packet, op._overloadname, None)
    return mutating if mutating is not None and _inputs(mutating) == _inputs(op) else None


def _out(op: OpOverload) -> OpOverload | None:
    """Return the ``out=`` overload with the same inputs, if there is one."""
    for name in op.overloadpacket.overloads():
        candidate: OpOverload = getattr(op.overloadpacket, name)
        inputs = [(a.name, str(a.type)) for a in candidate._schema.arguments if not a.is_out]
        if len(inputs) < len(candidate._schema.arguments) and inputs == _inputs(op):
            return candidate
    return None


def _inputs(op: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def _out_specs(op: OpOverload, mutating: OpOverload, sample: Sample) -> dict[str, Spec]:
    """Return Specs for the ``out=`` arguments, with the shapes that the plain call gives on the meta device."""
    names = [argument.name for argument in mutating._schema.arguments if argument.is_out]
    if not names:
        return {}
    with FakeTensorMode():
        args, kwargs = sample.build((torch.float32,) * sample.floats(), "cpu")
        outputs = tree_leaves(op(*args, **kwargs))
    return {
        name: Spec(tuple(output.shape), None if output.dtype is torch.float32 else output.dtype)
        for name, output in zip(names, outputs, strict=True)
    }
