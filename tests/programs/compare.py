"""Run a program under eager autocast and through fxamp, and say what differs."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from programs.outcome import Outcome, observe
from programs.program import Flavour, Program, Setting
from programs.render import build
from torch import Tensor


class Refused(Exception):
    """The oracle itself cannot run the program."""


def differences(program: Program, setting: Setting) -> list[str]:
    """What fxamp does otherwise than eager autocast. Raises Refused where eager autocast raises.

    A program that needs autocast to run at all is captured under one, whatever the setting says.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = _attempt(run_eager, program)
        if isinstance(wanted, Exception):
            raise Refused(f"{type(wanted).__name__}: {wanted}") from wanted
        plain = wanted if setting.ambient else _attempt(run_plain, program)
        if isinstance(plain, Exception):
            plain, setting = wanted, replace(setting, ambient=True)
        try:
            got = run_compiled(program, setting)
        except Exception as error:  # whatever a compiler raises is a finding
            return [f"raised {type(error).__name__}: {error}"]
    return list(_compare(got, wanted, plain))


def _attempt(run: Callable[[Program], Outcome], program: Program) -> Outcome | Exception:
    try:
        return run(program)
    except Exception as error:
        return error


def run_plain(program: Program) -> Outcome:
    """In float32, as Dynamo captures it."""
    module, inputs = build(program)
    return observe(module, module, inputs)


def run_eager(program: Program) -> Outcome:
    """Under eager autocast, in the oracle's flavour."""
    module, inputs = build(program, Flavour.ORACLE)
    return observe(_under_autocast(module, program), module, inputs)


def run_compiled(program: Program, setting: Setting) -> Outcome:
    """Through fxamp."""
    torch._dynamo.reset()
    module, inputs = build(program)
    compiled = torch.compile(module, backend="fxamp", options=setting.options(program.lower))
    return observe(_under_autocast(compiled, program) if setting.ambient else compiled, module, inputs)


def _under_autocast(run: Callable[..., list[Tensor]], program: Program) -> Callable[..., list[Tensor]]:
    def call(*args: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", program.lower):
            return run(*args)

    return call


def _compare(got: Outcome, wanted: Outcome, plain: Outcome) -> Iterator[str]:
    for i, (ours, theirs) in enumerate(zip(got.results, wanted.results, strict=True)):
        dtype = torch.promote_types(plain.results[i].dtype, theirs.dtype)
        if ours.dtype != dtype:
            yield f"result {i} is {ours.dtype}, expected {dtype}"
        yield from _values(f"result {i}", ours, theirs)
    for name, theirs in wanted.gradients.items():
        yield from _gradients(f"the gradient of {name}", got.gradients.get(name), theirs)
    for name, theirs in wanted.state.items():
        yield from _values(f"{name} after the call", got.state[name], theirs)
    if got.same != wanted.same:
        yield f"one object: {sorted(got.same)}, with autocast {sorted(wanted.same)}"
    if got.shared != wanted.shared:
        yield f"shared memory: {sorted(got.shared)}, with autocast {sorted(wanted.shared)}"


def _gradients(what: str, ours: Tensor | None, theirs: Tensor | None) -> Iterator[str]:
    if ours is None or theirs is None:
        if ours is not theirs:
            yield f"{what} is {'None' if ours is None else 'there'}, with autocast it is not"
        return
    if ours.dtype != theirs.dtype:
        yield f"{what} is {ours.dtype}, with autocast {theirs.dtype}"
    yield from _values(what, ours, theirs)


def _values(what: str, ours: Tensor, theirs: Tensor) -> Iterator[str]:
    a, b = ours.double(), theirs.double()
    if a.shape != b.shape:
        yield f"{what} has shape {tuple(a.shape)}, with autocast {tuple(b.shape)}"
    elif not bool((a.eq(b) | (a.isnan() & b.isnan())).all()):
        yield f"{what} differs by up to {(a - b).abs().max():.3g}"
