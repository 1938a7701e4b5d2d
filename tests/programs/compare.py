"""Run a program under eager autocast and through fxamp, and say what differs."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from programs.orders import random_order
from programs.outcome import Outcome, Run, observe
from programs.program import ALL, Flavour, Program, Setting
from programs.render import build, source
from programs.tensors import flat
from programs.threads import observe_in_threads
from programs.training import train
from torch import Tensor
from torch._dynamo.output_graph import OutputGraph

import fxamp
from fxamp.backend import auto_products
from fxamp.errors import CaptureError, OptionError

#: Far from overflow and underflow for gradients around 1.
_SCALE = 2.0**8

_RAISED = "raised"
_ZEROS = "all zeros"
_NAN = "zeros but for NaN"
#: What AOTAutograd returns for the gradients of unused results: a product of zeros and infinities is NaN.
_IDLE = (_ZEROS, _NAN)
_BY = " differs by up to "
_SHARED = "shared memory: "
#: How many orders of sums are tried.
_ORDERS = 16
#: Why a program that returns its inputs cannot be rewritten.
_NOTHING = "it computes nothing"
#: What torch's checkpoints raise in eager mode too, where a policy of theirs saves what is written to.
_MUTATED = "Tensor cached during selective activation checkpoint has been mutated"

#: What the messages of one error differ in: addresses, places in loaded sources, names of backends and of inputs.
_VARYING = re.compile(r"0x[0-9a-f]+|<random \w+ \d+>(\", line \d+)?|(?<=backend=)'\w+'|(?<=input \d )\([\w\[\]]+\)")


class Refused(Exception):
    """The program says nothing about fxamp: eager autocast, or torch.compile alone, cannot run it as it stands."""


def differences(program: Program, setting: Setting) -> list[str]:
    """What fxamp does otherwise than eager autocast, but for the gradients of what no used result was made of.

    There torch.compile has zeros where autocast has None, and so has fxamp; see :data:`_IDLE`.

    Raises Refused where eager autocast raises, and where torch.compile without fxamp differs from eager mode: what
    AOTAutograd or Dynamo change is not fxamp's doing.
    """
    setting = replace(setting, parted=not {"graph_break", "gradient"}.isdisjoint(program.kinds()))
    with warnings.catch_warnings(action="ignore"):
        expected = oracle(run_eager, program, setting)
        if setting.own and not _says(program):
            raise Refused("no region of the program says anything")
        plain = expected if setting.ambient or setting.own else oracle(run_plain, program, setting)
        differences = _differences(lambda: run_compiled(program, setting), expected, plain, setting)
        broken, uncompiled = breaks(), frames_not_compiled()
        if any(map(_is_idle, differences)):
            differences = _without_idle_of_torch(program, setting, differences, expected, plain)
        if differences and all(map(_is_value_of_a_gradient, differences)) and setting.used != ALL:
            differences = _from_zeros(program, setting, plain) and differences
        if _parts_a_view(program, setting, differences):
            raise Refused("a view that an autograd.Function returns has memory of its own under a named policy")
        if differences and broken:
            raise Refused(f"Dynamo breaks the graph: {broken[0]}")
        if differences and _backend_raised() and _backend_raises_alone(program, setting, expected):
            raise Refused("torch.compile alone: its backend raises, and Dynamo goes on without it")
        if differences and _stale(program, setting, expected, plain, differences):
            raise Refused("autocast's cache is stale: a leaf was written to after it had been cast")
        if differences and _mixed(program, setting, expected, plain, differences):
            raise Refused("autocast's cache mixes dtypes, and Dynamo has read the dtype of what comes of it")
        if differences and _parted(expected, plain):
            raise Refused("results that are one under autocast leave in two dtypes, as captured")
        changed = _changed_by_torch(program, setting, differences, expected) if differences else []
        if changed:
            raise Refused(f"torch.compile alone: {changed[0]}")
        if _raised(differences) and _raises_as_written(program, setting, differences[0], expected):
            raise Refused(f"eager mode too: {differences[0]}")
        if _raised(differences):  # AOTAutograd traces the backward of all results
            oracle(run_eager, program, replace(setting, used=ALL))
        if differences and _reordered(program, setting, expected, differences):
            raise Refused("autograd's gradients, their terms added in another order")
    return differences + uncompiled if differences else []


def _is_idle(difference: str) -> bool:
    return any(idle in difference for idle in _IDLE)


def _without_idle_of_torch(
    program: Program, setting: Setting, differences: list[str], expected: Outcome, plain: Outcome
) -> list[str]:
    """Take from ``differences`` the idle gradients that torch.compile returns too: NaN only where it has NaN.

    Where torch.compile cannot trace the program under autocast, it says in float32 which gradients are idle; so it does
    under a policy that captures float32. Where it cannot do that either, eager autocast says with zeros for the
    gradients of unused results, as AOTAutograd has them.
    """
    same = _torch_differences(program, setting, expected)
    if _raised(same):
        same = _differences(lambda: run_compiled_by_torch(program, setting), expected, expected, setting)
    if _raised(same):
        return _from_zeros(program, setting, plain)
    left = _without_idle(differences, same)
    if any(map(_is_idle, left)) and plain is not expected:
        return _without_idle(left, _differences(lambda: run_compiled_by_torch(program, setting), plain, plain, setting))
    return left


def _without_idle(differences: list[str], others: list[str]) -> list[str]:
    excused = {*others, *(one.replace(_NAN, _ZEROS) for one in others)}
    return [one for one in differences if not (_is_idle(one) and one in excused)]


def _from_zeros(program: Program, setting: Setting, plain: Outcome) -> list[str]:
    """What differs where eager autocast too gets zeros as the gradients of unused results, as AOTAutograd does.

    A Function whose backward is not linear makes other gradients of zeros than of none.
    """
    zeroed = oracle(run_eager, program, replace(setting, zeros=True))
    return _differences(lambda: run_compiled(program, setting), zeroed, plain, setting)


def breaks() -> list[str]:
    """Why Dynamo broke graphs since its last reset, but where the program asks for it."""
    counters = torch._dynamo.utils.counters
    reasons = [reason.splitlines()[0] for reason in (*counters["graph_break"], *_ENDS)]
    skipped = any("Skipping the frame" in reason for reason in counters["unimplemented"])
    asked = [reason for reason in reasons if "graph_break()" in reason or "torch.autograd.grad" in reason]
    return [reason for reason in reasons if reason not in asked] + ["and skips the whole frame"] * skipped


def _backend_raised() -> bool:
    """Whether a backend raised for a value that only a run tells, since the counters were cleared."""
    return any(
        reason.startswith("Backend compiler exception") for reason in torch._dynamo.utils.counters["unimplemented"]
    )


def _backend_raises_alone(program: Program, setting: Setting, expected: Outcome) -> bool:
    torch._dynamo.utils.counters.clear()
    _torch_differences(program, setting, expected)
    return _backend_raised()


def frames_not_compiled() -> list[str]:
    """How many frames Dynamo left as they are since its last reset, and all reasons that it counted."""
    counters = torch._dynamo.utils.counters
    total, compiled = counters["frames"]["total"], counters["frames"]["ok"]
    reasons = [*counters["unimplemented"], *counters["graph_break"]]
    return [f"Dynamo compiled {compiled} of {total} frames: {reasons}"] if compiled < total else []


#: Why graphs ended in front of more of the program since Dynamo's last reset: it counts no break at a size that depends
#: on values.
_ENDS: list[str] = []


@contextmanager
def _ends_noted() -> Iterator[None]:
    compile_subgraph = OutputGraph.compile_subgraph

    def noting(graph: OutputGraph, tx: Any, reason: Any, *args: Any, **named: Any) -> Any:
        if reason.graph_break:
            _ENDS.append(str(reason.reason).strip())
        return compile_subgraph(graph, tx, reason, *args, **named)

    _ENDS.clear()
    with patch.object(OutputGraph, "compile_subgraph", noting):
        yield


def _stale(program: Program, setting: Setting, expected: Outcome, plain: Outcome, differences: list[str]) -> bool:
    """Whether only autocast's cache explains ``differences``: it keeps the cast of a leaf that was written to.

    Then either the results differ with the cache and not without it, or nothing that differs with it does without it:
    fxamp casts such a leaf for each use, so its gradients meet in float32.
    """
    if not expected.written:
        return False
    try:
        uncached = run_eager(program, setting, cached=False)
    except RuntimeError:  # autograd refuses a write that the cached casts hide
        return False
    without = _differences(lambda: run_compiled(program, setting), uncached, plain, setting)
    if any(map(_is_result, compared(uncached, expected, plain, setting))) and not any(map(_is_result, without)):
        return True
    return not {_what(one) for one in differences} & {_what(one) for one in without}


def _mixed(program: Program, setting: Setting, expected: Outcome, plain: Outcome, differences: list[str]) -> bool:
    """Whether autocast's cache hands out casts of another region's dtype, so that eager mode cannot run the program.

    Dynamo's trace can, and the dtypes that the program asks for are those of such a mixture. Without the cache no
    result differs.
    """
    try:
        _run_eager(program, setting, Flavour.PROGRAM)
    except Exception:  # a hook may get no gradient
        with suppress(Exception):  # which has another cause, where the program raises without the cache too
            uncached = run_eager(program, setting, cached=False)
            expected = uncached if setting.ambient else expected
            without = _differences(lambda: run_compiled(program, setting, cached=False), expected, plain, setting)
            return not without or (any(map(_is_result, differences)) and not any(map(_is_result, without)))
    return False


def _raises_as_written(program: Program, setting: Setting, raised: str, expected: Outcome) -> bool:
    """Whether eager mode raises the same in the program's own flavour, or torch.compile alone raises too.

    A selective checkpoint has one backward; a hook on one of the results of an op may get no gradient.
    """
    try:
        _run_eager(program, setting, Flavour.PROGRAM)
    except Exception as error:
        same = raised.startswith(f"{_RAISED} {type(error).__name__}: {error}")
        return same or _raised(_torch_differences(program, setting, expected))
    return False


def _reordered(program: Program, setting: Setting, expected: Outcome, differences: list[str]) -> bool:
    """Whether gradients alone differ, and each is bit for bit what eager autocast returns in some other order of sums.

    Sums are rounded, so the order shows; a graph may add three terms in another than autograd does.
    """
    if not all(map(_is_value_of_a_gradient, differences)):
        return False
    names = {f"the gradient of {name}": name for name in expected.gradients}
    ours = run_compiled(program, setting).gradients
    left = {names[_what(one)] for one in differences}
    for seed in range(_ORDERS):
        with random_order(seed):
            theirs = run_eager(program, setting).gradients
        left = {name for name in left if any(_gradients(name, ours[name], theirs[name], setting))}
    return not left


def _what(difference: str) -> str:
    return difference.partition(_BY)[0]


def _parts_a_view(program: Program, setting: Setting, differences: list[str]) -> bool:
    """Whether results share less memory, and a Function returns a view: a documented limit."""
    named = not (setting.ambient or setting.own) and setting.schedule != "rewritten"
    views = any("view_as(" in text for name, text in program.definitions if name.startswith("Function"))
    return named and views and any(one.startswith(_SHARED) for one in differences)


def _parted(expected: Outcome, plain: Outcome) -> bool:
    """Whether autocast's results share memory that the captured dtypes part: ``h.bfloat16()`` of a float32 ``h``.

    The loss takes one result for each piece of memory, so it is another one then.
    """
    pairs = zip(plain.results, expected.results, strict=True)
    dtypes = {f"result {i}": torch.promote_types(p.dtype, w.dtype) for i, (p, w) in enumerate(pairs)}
    parted = (expected.shared | expected.same) - (plain.shared | plain.same)
    both = [(dtypes[a], dtypes[b]) for a, b in parted if a in dtypes and b in dtypes]
    return any(a != b for a, b in both)


def _is_value_of_a_gradient(difference: str) -> bool:
    return difference.startswith("the gradient of ") and _BY in difference


def _is_result(difference: str) -> bool:
    return difference.startswith(("result ", _RAISED))


def oracle(run: Callable[[Program, Setting], Outcome], program: Program, setting: Setting) -> Outcome:
    """What ``run`` returns; Refused for what it raises."""
    try:
        return run(program, setting)
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def _differences(run: Callable[[], Outcome], expected: Outcome, plain: Outcome, setting: Setting) -> list[str]:
    return found_in(lambda: compared(run(), expected, plain, setting))


def found_in(comparison: Callable[[], Iterator[str]]) -> list[str]:
    """What a comparison finds, or what it raised; Refused where fxamp refuses the program by name."""
    try:
        return list(comparison())
    except Exception as error:  # whatever a compiler raises is a finding, but what fxamp refuses by name
        cause = error.__cause__ or error
        if isinstance(cause, OptionError) or (isinstance(error, CaptureError) and _NOTHING in str(error)):
            raise Refused(str(cause)) from error
        if _MUTATED in str(error):
            raise Refused(_MUTATED) from error
        return [f"{_RAISED} {type(error).__name__}: {_VARYING.sub('', str(error))}"]


def _torch_differences(program: Program, setting: Setting, expected: Outcome) -> list[str]:
    """How torch.compile alone differs from ``expected``."""
    run = partial(run_compiled_by_torch, program, setting, ambient=not setting.own)
    return _differences(run, expected, expected, setting)


def _changed_by_torch(program: Program, setting: Setting, differences: list[str], expected: Outcome) -> list[str]:
    """What torch.compile changes in float32, or under autocast if it changes the same there, and no less.

    That torch.compile raises excuses no other fault than an error, of whatever text. Where it returns the same wrong
    results, gradients differ as they may.
    """
    changed = _changed_in_float32(program, setting)
    if changed and _raised(changed) == _raised(differences):
        return changed
    same = _torch_differences(program, setting, expected)
    if _raised(same) and _raised(differences):
        return same
    results = [one for one in differences if one.startswith("result ")]
    if results and _raised(same):  # torch.compile's wrong results can make its backward raise
        setting = replace(setting, schedule="forward")
        expected = run_eager(program, setting)
        same = _torch_differences(program, setting, expected)
    return same if all(_covered(one, same) for one in results or differences) else []


def _covered(one: str, others: list[str]) -> bool:
    """Whether ``others`` have the same difference, of no smaller an amount; amounts are sums that 16 bits round."""
    what, by, amount = one.partition(_BY)
    amounts = [float(theirs.partition(_BY)[2]) for theirs in others if theirs.startswith(what + _BY)]
    rounded = 1 + 2 * torch.finfo(torch.bfloat16).eps
    return one in others or (bool(by) and any(float(amount) <= rounded * theirs for theirs in amounts))


def _changed_in_float32(program: Program, setting: Setting) -> list[str]:
    try:
        plain = run_plain(program, setting)
    except Exception:  # it needs autocast
        return []
    changed = _differences(lambda: run_compiled_by_torch(program, setting), plain, plain, setting)
    return [one for one in changed if not _is_idle(one)]


def _raised(differences: list[str]) -> bool:
    return any(one.startswith(_RAISED) for one in differences)


def run_plain(program: Program, setting: Setting) -> Outcome:
    """In float32, as Dynamo captures it."""
    built = build(program)
    return _observe(Run(built.flat(built.module), built.module, built.inputs, _scaler(setting)), setting)


def run_compiled_by_torch(program: Program, setting: Setting, ambient: bool = False) -> Outcome:
    """Through torch.compile alone, in float32 or under autocast."""

    def start() -> Run:
        torch._dynamo.reset()
        built, whole = build(program, Flavour.ALONE), setting.schedule == "rewritten"
        backend = "eager" if whole else setting.lowering
        if backend == "eager" and "nested_regions" in program.kinds():
            backend = "aot_eager"  # torch's "eager" has no backward of such regions
        compiled = torch.compile(built.module, backend=backend, fullgraph=whole)
        call = built.flat(compiled)
        evaluates = call if setting.ambient else None
        call = _under_autocast(call, program) if ambient else call
        return Run(call, built.module, built.inputs, _scaler(setting), start, evaluates)

    with torch._functorch.config.patch(donated_buffer=False):  # else it takes no ``retain_graph=True``
        return _observe(start(), setting)


def run_eager(program: Program, setting: Setting, cached: bool = True) -> Outcome:
    """Under eager autocast, in the oracle's flavour if its casts are ``cached``, with torch's scaler."""
    return _run_eager(program, setting, Flavour.ORACLE if cached else Flavour.PROGRAM, cached)


def run_exact(program: Program, setting: Setting) -> Outcome:
    """As :func:`run_eager`, in the exact flavour."""
    return _run_eager(program, setting, Flavour.EXACT)


def _run_eager(program: Program, setting: Setting, flavour: Flavour, cached: bool = True) -> Outcome:
    built = build(program, flavour)
    module, call = built.module, built.flat(built.module)
    evaluates = call if setting.ambient else None
    call = call if setting.own and cached else _under_autocast(call, program, cached, not setting.own)
    with nullcontext() if setting.ambient else patch.object(torch.autograd, "grad", _gradients_outside_of_autocast):
        outcome = _observe(Run(call, module, built.inputs, _scaler(setting), evaluates=evaluates), setting)
    if setting.scaled:  # torch's scaler leaves alone what no optimizer has
        scaled = [
            g
            for name, g in outcome.gradients.items()
            if g is not None and name not in module.state_dict(keep_vars=True)
        ]
        for gradient in scaled:
            gradient /= _SCALE
    return outcome


def _gradients_outside_of_autocast(
    *args: Any, autograd_grad: Callable[..., Any] = torch.autograd.grad, **named: Any
) -> Any:
    """``torch.autograd.grad`` as torch recommends it: autocast would cast the backward of what ran in float32 too."""
    with torch.autocast("cpu", enabled=False):
        return autograd_grad(*args, **named)


def run_compiled(program: Program, setting: Setting, cached: bool = True) -> Outcome:
    """Through fxamp. Autocast, ambient or of the program, which Dynamo traces, caches its casts if ``cached``."""
    torch._dynamo.utils.counters.clear()

    def start(scale: float = _SCALE) -> Run:
        torch._dynamo.reset()
        built = build(program)
        module, inputs = built.module, built.inputs
        if setting.schedule == "rewritten":
            rewritten = fxamp.rewrite(module, built.positional, setting.policy(program.lower))
            return Run(built.flat(rewritten), module, inputs)
        options: dict[str, Any] = {"policy": setting.policy(program.lower), "lowering": setting.lowering}
        if setting.watched:
            options["nonfinite"] = "log"
        scaler = fxamp.GradScaler("cpu", init_scale=scale) if setting.scaled else None
        if scaler is not None:
            options["scaler"] = scaler
        call = built.flat(torch.compile(module, backend="fxamp", options=options))
        evaluates = call if setting.ambient else None
        call = _under_autocast(call, program, cached, setting.ambient) if setting.ambient or not cached else call
        state = "cpu-bfloat16-lean" if setting.compiled == "compiled-lean" else None
        optimizes = partial(fxamp.compile_optimizer, policy=state, lowering="aot_eager") if setting.compiled else None
        return Run(call, module, inputs, scaler, lambda: start(2 * _SCALE), evaluates, optimizes)

    with _casting_alone(), _ends_noted():
        return _observe(start(), setting)


@contextmanager
def _casting_alone() -> Iterator[None]:
    """On a CPU on which "auto" casts every program that says nothing."""
    with (
        patch.object(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}),
        patch.object(auto_products, "FLOPS_PER_ELEMENT", 0),
        patch.object(auto_products, "FLOPS_PER_CALL", 0),
    ):
        yield


def _says(program: Program) -> bool:
    """Whether a region of the program is on."""
    return any('with torch.autocast("cpu", torch.' in line for line in source(program).splitlines())


def _observe(run: Run, setting: Setting) -> Outcome:
    torch.manual_seed(7)
    with _captured(setting):
        if setting.schedule == "threads":
            return observe_in_threads(run, setting)
        return train(run, setting) if setting.schedule in ("train", "restart") else observe(run, setting)


def _scaler(setting: Setting) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler("cpu", init_scale=_SCALE) if setting.scaled else None


def _captured(setting: Setting) -> AbstractContextManager[None]:
    """Let Dynamo capture sizes and numbers that depend on values, as for ``fullgraph=True``, and perhaps gradients."""
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True, trace_autograd_ops=setting.traced
    )
    return patched


def _under_autocast(
    run: Callable[..., list[Tensor]], program: Program, cached: bool = True, enabled: bool = True
) -> Callable[..., list[Tensor]]:
    """``run`` under an ambient autocast; one that is not ``enabled`` says whether those of the program cache."""

    def call(*args: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", program.lower, enabled, cached):
            return run(*args)

    return call


def compared(got: Outcome, expected: Outcome, plain: Outcome, setting: Setting) -> Iterator[str]:
    """How ``got`` differs from ``expected``, bit for bit; ``plain`` has the captured dtypes."""
    for i, (ours, theirs) in enumerate(zip(got.results, expected.results, strict=True)):
        if ours.dtype not in _result_dtypes(plain.results[i].dtype, theirs.dtype, setting):
            yield f"result {i} is {ours.dtype}, captured {plain.results[i].dtype}, with autocast {theirs.dtype}"
        yield from _values(f"result {i}", ours, theirs)
    for name, theirs in expected.gradients.items():
        yield from _gradients(f"the gradient of {name}", got.gradients.get(name), theirs, setting)
    for name, theirs in expected.state.items():
        yield from _values(f"{name} after the call", got.state[name], theirs, _sum_error(theirs, setting))
    if got.scale != expected.scale:
        yield f"the scale becomes {got.scale}, with autocast {expected.scale}"
    if got.same != expected.same:
        yield f"one object: {sorted(got.same)}, with autocast {sorted(expected.same)}"
    if got.shared != expected.shared:
        yield f"{_SHARED}{sorted(got.shared)}, with autocast {sorted(expected.shared)}"


def _result_dtypes(captured: torch.dtype, autocast: torch.dtype, setting: Setting) -> set[torch.dtype]:
    """What may leave a graph: the captured dtype, or what holds it and autocast's; float32 where a loss is scaled.

    A rewritten program returns autocast's.
    """
    if setting.schedule == "rewritten":
        return {autocast}
    wide = torch.promote_types(captured, autocast)
    narrow = {autocast} if captured.itemsize == 2 else set()
    return {wide, torch.promote_types(wide, torch.float32), *narrow} if setting.scaled else {wide, *narrow}


def _sum_error(theirs: Tensor, setting: Setting) -> float:
    """The error of another order of summation: an eager region with a scaler sums the gradients of each call first."""
    several = setting.schedule == "together" or setting.parted
    if not (setting.scaled and setting.lowering == "eager" and several and theirs.numel()):
        return 0.0
    return 4 * torch.finfo(torch.float32).eps * float(theirs.detach().abs().max())


def _gradients(what: str, ours: Tensor | None, theirs: Tensor | None, setting: Setting) -> Iterator[str]:
    if ours is None or theirs is None:
        if ours is not None and theirs is None:
            yield f"{what} is {_holds(flat(ours))}, with autocast it is None"
        elif theirs is not None:
            yield f"{what} is None, with autocast it is not"
        return
    if (ours.dtype, ours.layout) != (theirs.dtype, theirs.layout):
        yield f"{what} is {ours.dtype}, {ours.layout}, with autocast {theirs.dtype}, {theirs.layout}"
    yield from _values(what, ours, theirs, _sum_error(theirs, setting))


def _holds(gradient: Tensor) -> str:
    if gradient.nan_to_num(0.0, 1.0, 1.0).any():
        return "there"
    return _NAN if gradient.isnan().any() else _ZEROS


def _values(what: str, ours: Tensor, theirs: Tensor, error: float = 0.0) -> Iterator[str]:
    a, b = flat(ours).double(), flat(theirs).double()
    if a.shape != b.shape:
        yield f"{what} has shape {tuple(a.shape)}, with autocast {tuple(b.shape)}"
    elif not bool((a.eq(b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= error)).all()):
        yield f"{what}{_BY}{(a - b).abs().max():.3g}"
