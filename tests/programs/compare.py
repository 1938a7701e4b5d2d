"""Run a program under eager autocast and through fxamp, and say what differs."""

import warnings
from collections.abc import Callable, Iterator

import torch
from programs.outcome import Outcome, observe
from programs.program import Flavour, Program, Setting
from programs.render import build
from torch import Tensor


class Refused(Exception):
    """The program says nothing about fxamp: eager autocast, or torch.compile alone, cannot run it as it stands."""


def differences(program: Program, setting: Setting) -> list[str]:
    """What fxamp does otherwise than eager autocast.

    Raises Refused where eager autocast raises, and where torch.compile in float32, without fxamp, differs from eager
    float32: what AOTAutograd or Dynamo change is not fxamp's doing.
    """
    with warnings.catch_warnings(action="ignore"):
        wanted = _oracle(run_eager, program)
        plain = wanted if setting.ambient else _oracle(run_plain, program)
        found = _found(lambda: run_compiled(program, setting), wanted, plain)
        if found and _breaks() and "graph_break" not in program.kinds():
            raise Refused(f"Dynamo breaks the graph: {_breaks()[0]}")
        changed = _changed_by_torch(program, setting) if found else []
        if changed:
            raise Refused(f"torch.compile in float32: {changed[0]}")
    return found


def _breaks() -> list[str]:
    """Why Dynamo broke graphs since its last reset."""
    return [reason.splitlines()[0] for reason in torch._dynamo.utils.counters["graph_break"]]


def _oracle(run: Callable[[Program], Outcome], program: Program) -> Outcome:
    try:
        return run(program)
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def _found(run: Callable[[], Outcome], wanted: Outcome, plain: Outcome) -> list[str]:
    try:
        return list(_compare(run(), wanted, plain))
    except Exception as error:  # whatever a compiler raises is a finding
        return [f"raised {type(error).__name__}: {error}"]


def _changed_by_torch(program: Program, setting: Setting) -> list[str]:
    try:
        plain = run_plain(program)
    except Exception:  # it runs under autocast only, so float32 tells nothing
        return []
    return _found(lambda: run_compiled_plain(program, setting.lowering), plain, plain)


def run_plain(program: Program) -> Outcome:
    """In float32, as Dynamo captures it."""
    module, inputs = build(program)
    return observe(module, module, inputs)


def run_compiled_plain(program: Program, backend: str) -> Outcome:
    """In float32 through torch.compile alone."""
    torch._dynamo.reset()
    module, inputs = build(program)
    return observe(torch.compile(module, backend=backend), module, inputs)


def run_eager(program: Program) -> Outcome:
    """Under eager autocast, in the oracle's flavour."""
    module, inputs = build(program, Flavour.ORACLE)
    return observe(_under_autocast(module, program), module, inputs)


def run_compiled(program: Program, setting: Setting) -> Outcome:
    """Through fxamp."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
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
        wide = torch.promote_types(plain.results[i].dtype, theirs.dtype)
        if ours.dtype not in (wide, theirs.dtype if plain.results[i].dtype.itemsize == 2 else wide):
            yield f"result {i} is {ours.dtype}, captured {plain.results[i].dtype}, with autocast {theirs.dtype}"
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
