"""Say what fxamp does with a program otherwise than eager autocast, and what of it is not fxamp's doing."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from programs import device
from programs.loop_sums import loop_rounds_as_well
from programs.orders import ORDERS, random_order
from programs.outcome import Outcome
from programs.outcome_differences import BY, EXTRA, NAN, SHARED, ZEROS, compared, gradient_differences
from programs.program import ALL, Flavour, Program, Setting
from programs.render import source
from programs.ways import (
    breaks,
    frames,
    idle_dropout_as_view,
    run_compiled,
    run_compiled_by_torch,
    run_eager,
    run_in_flavour,
    run_plain,
)

from fxamp.errors import CaptureError, DoubleBackwardError, OptionError

_RAISED = "raised"
#: What AOTAutograd returns for the gradients of unused results: a product of zeros and infinities is NaN.
_IDLE = (ZEROS, NAN)
#: Why a program that returns its inputs cannot be rewritten.
_NOTHING = "it computes nothing"
#: What fxamp says of a hook that torch 2.11's Dynamo makes a Function of.
_HOOKED = "a second backward through a value with a hook"
#: What torch's checkpoints raise in eager mode too, where a policy of theirs saves what is written to.
_MUTATED = "Tensor cached during selective activation checkpoint has been mutated"

#: What the messages of one error differ in: addresses, places in loaded sources, names of backends and of inputs.
_VARYING = re.compile(r"0x[0-9a-f]+|<random \w+ \d+>(\", line \d+)?|(?<=backend=)'\w+'|(?<=input \d )\([\w\[\]]+\)")

_TRANSFORM = re.compile(r"torch\.(vmap|func\.)")


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
        broken, compiled = breaks(), frames()
        if any(map(_is_idle, differences)):
            differences = _without_idle_of_torch(program, setting, differences, expected, plain)
        partly = setting.used != ALL or setting.schedule == "apart"
        if differences and all(BY in one for one in differences) and partly:
            differences = _from_zeros(program, setting, plain) and differences
        if _parts_a_view(program, setting, differences):
            raise Refused("a view that an autograd.Function returns has memory of its own under a named policy")
        if differences and broken:
            raise Refused(f"Dynamo breaks the graph: {broken[0]}")
        if differences and _backend_raised(compiled) and _backend_raises_alone(program, setting, expected):
            raise Refused("torch.compile alone: its backend raises, and Dynamo goes on without it")
        if differences and _stale(program, setting, expected, plain, differences):
            raise Refused("autocast's cache is stale: a leaf was written to after it had been cast")
        if differences and _cast_in_a_transform(program, setting, plain, differences):
            raise Refused(
                "a leaf has a cast of its own inside a torch.func transform, and its gradients meet in float32"
            )
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
        if differences and _equals_the_program(program, setting, plain, differences):
            return []
        if differences and _reordered(program, setting, expected, differences):
            raise Refused("autograd's gradients, their terms added in another order")
        if differences and _summed_in_a_loop(program, setting, differences):
            raise Refused("autograd's gradients, those of a loop added first")
    return [*differences, compiled] if differences else []


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
    ways = [_torch_differences(program, setting, expected)]
    if setting.lowering == "eager" and "nested_regions" in program.kinds():
        ways.append(_torch_differences(program, setting, expected, regions=False))
    if all(map(_raised, ways)):
        ways = [_differences(lambda: run_compiled_by_torch(program, setting), expected, expected, setting)]
    if all(map(_raised, ways)):
        left = _from_zeros(program, setting, plain)
        functions = any(name.startswith("Function") for name, _ in program.definitions)
        if left and setting.parted and functions and all(one.endswith(EXTRA) for one in left):
            raise Refused("torch.compile alone raises: nothing tells what a Function makes of zeros between graphs")
        return left
    same = [one for way in ways if not _raised(way) for one in way]
    left = _without_idle(differences, same)
    if any(map(_is_idle, left)) and plain is not expected:
        return _without_idle(left, _differences(lambda: run_compiled_by_torch(program, setting), plain, plain, setting))
    return left


def _without_idle(differences: list[str], others: list[str]) -> list[str]:
    excused = {*others, *(one.replace(NAN, ZEROS) for one in others)}
    return [one for one in differences if not (_is_idle(one) and one in excused)]


def _from_zeros(program: Program, setting: Setting, plain: Outcome) -> list[str]:
    """What differs where eager autocast too gets zeros as the gradients of unused results, as AOTAutograd does.

    A Function whose backward is not linear makes other gradients of zeros than of none.
    """
    zeroed = oracle(run_eager, program, replace(setting, zeros=True))
    return _differences(lambda: run_compiled(program, setting), zeroed, plain, setting)


def _backend_raises_alone(program: Program, setting: Setting, expected: Outcome) -> bool:
    torch._dynamo.utils.counters.clear()
    _torch_differences(program, setting, expected)
    return _backend_raised(frames())


def _backend_raised(compiled: str) -> bool:
    """Whether a backend raised for a value that only a run tells, by what :func:`frames` returned."""
    return "Backend compiler exception" in compiled


def _stale(program: Program, setting: Setting, expected: Outcome, plain: Outcome, differences: list[str]) -> bool:
    """Whether only autocast's cache explains ``differences``: it keeps the cast of a leaf that was written to.

    Then either the results differ with the cache and not without it, or nothing that differs with it does without it:
    fxamp casts such a leaf for each use, so its gradients meet in float32.
    """
    found = _without_cache(program, setting, plain) if expected.written else None
    if found is None:
        return False
    uncached, without = found
    if any(map(_is_result, compared(uncached, expected, plain, setting))) and not any(map(_is_result, without)):
        return True
    return _are_apart(differences, without)


def _cast_in_a_transform(program: Program, setting: Setting, plain: Outcome, differences: list[str]) -> bool:
    """Whether gradients alone differ, and each is what eager mode returns without autocast's cache.

    Eager mode shares a leaf's cast between the ops inside and outside of vmap: a documented limit.
    """
    if _TRANSFORM.search(source(program)) is None or not all(map(_is_value_of_a_gradient, differences)):
        return False
    found = _without_cache(program, setting, plain)
    return found is not None and _are_apart(differences, found[1])


def _without_cache(program: Program, setting: Setting, plain: Outcome) -> tuple[Outcome, list[str]] | None:
    """What eager autocast does without its cache, and how fxamp differs; None if autograd refuses a write there."""
    try:
        uncached = run_eager(program, setting, cached=False)
    except RuntimeError:  # the cached casts hide the write
        return None
    return uncached, _differences(lambda: run_compiled(program, setting), uncached, plain, setting)


def _are_apart(differences: list[str], others: list[str]) -> bool:
    """Whether nothing that differs in one differs in the other."""
    return not {_what(one) for one in differences} & {_what(one) for one in others}


def _mixed(program: Program, setting: Setting, expected: Outcome, plain: Outcome, differences: list[str]) -> bool:
    """Whether autocast's cache hands out casts of another region's dtype, so that eager mode cannot run the program.

    Dynamo's trace can, and the dtypes that the program asks for are those of such a mixture. Without the cache no
    result differs.
    """
    try:
        run_in_flavour(program, setting, Flavour.PROGRAM)
    except Exception:  # a hook may get no gradient
        with suppress(Exception):  # which has another cause, where the program raises without the cache too
            uncached = run_eager(program, setting, cached=False)
            expected = uncached if setting.ambient else expected
            without = _differences(lambda: run_compiled(program, setting, cached=False), expected, plain, setting)
            return not without or (any(map(_is_result, differences)) and not any(map(_is_result, without)))
    return False


def _raises_as_written(program: Program, setting: Setting, raised: str, expected: Outcome) -> bool:
    """Whether eager mode raises the same in the program's own flavour, or torch.compile alone raises too.

    A selective checkpoint has one backward; a hook on one of the results of an op may get no gradient. So does,
    in AOTAutograd's trace, a hook on an input of which no result is computed.
    """
    try:
        run_in_flavour(program, setting, Flavour.PROGRAM)
    except Exception as error:
        same = raised.startswith(f"{_RAISED} {type(error).__name__}: {error}")
        return same or _raised(_torch_differences(program, setting, expected))
    with idle_dropout_as_view():
        return raised in _torch_differences(program, setting, expected)


def _equals_the_program(program: Program, setting: Setting, plain: Outcome, differences: list[str]) -> bool:
    """Whether only values differ, and each is bit for bit what eager autocast makes of the program itself.

    The oracle unrolls loops. A loop adds the terms of a gradient in an order of its own, and its backward, which runs
    outside of autocast, recomputes its turns in float32. What equals the oracle may differ from the program: the
    recomputation of a checkpoint adds terms in an order of its own too.
    """
    if not all(BY in one for one in differences):
        return False
    try:
        written = run_in_flavour(program, setting, Flavour.PROGRAM)
    except Exception:  # eager mode does not run each of these loops
        return False
    left = _differences(lambda: run_compiled(program, setting), written, plain, setting)
    # Idle gradients are torch.compile's own; no others are left.
    return all(map(_is_idle, left)) or (all(BY in one for one in left) and _are_apart(differences, left))


def _reordered(program: Program, setting: Setting, expected: Outcome, differences: list[str]) -> bool:
    """Whether gradients alone differ, and each is bit for bit what eager autocast returns in some other order of sums.

    Sums are rounded, so the order shows; a graph may add three terms in another than autograd does.
    """
    if not all(map(_is_value_of_a_gradient, differences)):
        return False
    names = {f"the gradient of {name}": name for name in expected.gradients}
    ours = run_compiled(program, setting).gradients
    left = {names[_what(one)] for one in differences}
    for seed in range(ORDERS):
        with random_order(seed):
            theirs = run_eager(program, setting).gradients
        left = {name for name in left if any(gradient_differences(name, ours[name], theirs[name], setting))}
    return not left


def _summed_in_a_loop(program: Program, setting: Setting, differences: list[str]) -> bool:
    """Whether gradients alone differ, and no more than a loop explains that adds its terms first."""
    gradients = all(map(_is_value_of_a_gradient, differences))
    return gradients and loop_rounds_as_well(program, setting, {_what(one) for one in differences})


def _what(difference: str) -> str:
    return difference.partition(BY)[0]


def _parts_a_view(program: Program, setting: Setting, differences: list[str]) -> bool:
    """Whether results share less memory, and a Function returns a view: a documented limit."""
    named = not (setting.ambient or setting.own) and setting.schedule != "rewritten"
    views = any("view_as(" in text for name, text in program.definitions if name.startswith("Function"))
    return named and views and any(one.startswith(SHARED) for one in differences)


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
    return difference.startswith("the gradient of ") and BY in difference


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
        if isinstance(cause, DoubleBackwardError) and _HOOKED in str(cause):
            raise Refused(_HOOKED) from error
        if _MUTATED in str(error):
            raise Refused(_MUTATED) from error
        return [f"{_RAISED} {type(error).__name__}: {_VARYING.sub('', str(error))}"]


def _torch_differences(program: Program, setting: Setting, expected: Outcome, regions: bool = True) -> list[str]:
    """How torch.compile alone differs from ``expected``."""
    run = partial(run_compiled_by_torch, program, setting, not setting.own, regions)
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
    what, by, amount = one.partition(BY)
    amounts = [float(theirs.partition(BY)[2]) for theirs in others if theirs.startswith(what + BY)]
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


def _says(program: Program) -> bool:
    """Whether a region of the program is on."""
    return any(f'with torch.autocast("{device.current()}", torch.' in line for line in source(program).splitlines())
