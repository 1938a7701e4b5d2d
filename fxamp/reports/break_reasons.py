"""Why Dynamo ended a graph before the end of the program, and which functions it skipped entirely.

Dynamo stores the reason for most breaks on the graph. For the others, such as a break that it cannot resume from or a
branch on a tensor value, it only counts the message. Without those counters, fxamp would report less exact reasons. The
reason for skipping a function is the error that ends its compilation.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from fxamp.graph.submodules import submodules
from fxamp.torch_private import caller_inside, compiled_code, on_each_compilation, why_skipped
from fxamp.torch_private.parts.dynamo import RESUMED, counters

#: A function's file, first line and name.
Place = tuple[str, int, str]

#: The counts of Dynamo's messages when the current compilation started: of all, and of breaks.
_before: dict[str, Counter[str]] = {}

#: Why Dynamo skips functions, and where it ended a function's first graph: by file, line and name.
_skips: dict[Place, str] = {}
_ends: dict[Place, str] = {}

#: What a reason ends with where Dynamo cannot resume after the break, as in a try block or at a recurrent layer.
RUNS_ON = "; Dynamo leaves the rest of the function as it is written"

#: A heading and its explanation, which may go on in lines that are indented more.
_EXPLAINED = re.compile(r"^[^\S\n]*(\S.*)\n+( *)Explanation: (\S.*(?:\n\2 +\S.*)*)$", re.MULTILINE)


def why_ended(gm: GraphModule) -> str:
    """Return the reason and location of the graph break that ended ``gm``; ``""`` if the program returned there.

    It ends with ``RUNS_ON`` where Dynamo compiles nothing more of the function. Call it while ``gm`` is being compiled.
    """
    fresh = _fresh("unimplemented")
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    where = f"{reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}: " if reason.user_stack else ""
    recorded = str(reason.reason).strip()
    explained = [recorded] if "Explanation:" in recorded else fresh or [recorded]
    why = " or ".join(dict.fromkeys(map(_first, explained)))
    return where + (why.rstrip(".") + RUNS_ON if recorded == "step_unsupported" else why)


def skipped_functions(compiled: Any) -> list[str]:
    """List the functions of ``compiled``, a module or function, that Dynamo skips, with location and reason."""
    return [_line(place, _skips) for place in places_of(compiled, _skips)]


def ended_functions(compiled: Any) -> list[str]:
    """List the functions of ``compiled``, a module or function, whose first graph a break ended, with its reason."""
    return [_line(place, _ends) for place in places_of(compiled, _ends)]


def skipped_now() -> str:
    """Return the function that Dynamo gives up, with location and reason, when a compilation ends; ``""`` if none."""
    code = compiled_code()
    return _line(place_of(code), _skips) if code is not None and place_of(code) in _skips else ""


def calling_function() -> str:
    """Return the function, with its location, that calls the graph being compiled inside of the compiled call.

    ``""`` if the program itself calls the compiled function, or the graph continues it after a graph break.
    """
    code = caller_inside()
    return "" if code is None else described(place_of(code))


def ended_now() -> bool:
    """Whether a break ended the graph of the function that Dynamo has compiled, when a compilation ends."""
    code = compiled_code()
    return code is not None and place_of(code) in _ends


def _begin(*_: object) -> None:
    _before.clear()
    _before.update({kind: Counter(counters[kind]) for kind in ("unimplemented", "graph_break")})


def _end(*_: object) -> None:
    code, why = compiled_code(), why_skipped()
    if code is None:
        return
    for reasons, messages in ((_skips, [why] if why else []), (_ends, [] if why else _fresh("graph_break"))):
        reasons.pop(place_of(code), None)
        if messages:
            reasons[place_of(code)] = _first(messages[0])


def place_of(code: CodeType) -> Place:
    """Return where ``code`` is: its file, first line and name."""
    return code.co_filename, code.co_firstlineno, code.co_name


def places_of(compiled: Any, places: Iterable[Place]) -> list[Place]:
    """Return those of ``places`` that are of ``compiled``, a module or function, or follow a graph break in it."""
    codes = list(_codes(compiled))
    first = {(code.co_filename, code.co_firstlineno) for code in codes}
    return [
        place for place in places if place[:2] in first or (_resumes(place) and any(map(partial(_in, place), codes)))
    ]


def _resumes(place: Place) -> bool:
    """Whether Dynamo made the function for the code after a graph break."""
    return place[2].startswith(RESUMED)


def _in(place: Place, code: CodeType) -> bool:
    return place[0] == code.co_filename and any(place[1] == line for _, _, line in code.co_lines())


def described(place: Place) -> str:
    """Return a function's place in the form in which lines of reports begin."""
    file, line, name = place
    return f"{file}:{line}: {name}"


def _line(place: Place, reasons: dict[Place, str]) -> str:
    return f"{described(place)}: {reasons[place]}"


_begin()  # a program's own backend may import fxamp in the middle of a compilation
on_each_compilation(_begin, _end)


def _fresh(kind: str) -> list[str]:
    """Return the messages of this compilation."""
    return [message for message, count in counters[kind].items() if count > _before[kind][message]]


def _first(message: str) -> str:
    """Return a message's heading and explanation, the first ones if one break led to another; else its first line.

    The explanation alone may say too little: for several kinds of breaks it is "Dynamo does not support this."
    """
    explained = _EXPLAINED.search(message)
    if explained is None:
        return message.strip().splitlines()[0].strip()
    heading, _, explanation = explained.groups()
    return f"{heading.removeprefix('Graph Break Reason: ').rstrip(' .:')}: {' '.join(explanation.split())}"


def _codes(compiled: Any) -> Iterator[CodeType]:
    """Yield the code of a function, or of all methods of a module and its submodules."""
    if not isinstance(compiled, torch.nn.Module):
        code = getattr(getattr(compiled, "_torchdynamo_orig_callable", compiled), "__code__", None)
        return iter(() if code is None else (code,))
    classes = {
        kind for _, module in submodules(compiled) for kind in type(module).__mro__ if kind is not torch.nn.Module
    }
    codes = (getattr(value, "__code__", None) for kind in classes for value in vars(kind).values())
    return (code for code in codes if isinstance(code, CodeType))
