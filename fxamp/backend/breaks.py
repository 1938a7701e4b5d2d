"""Why Dynamo ended a graph before the end of the program, and which functions it skipped entirely.

Dynamo stores the reason for most breaks on the graph. For the others it only counts the message: a break that it cannot
resume from, a branch on a tensor value, a function that it skips. Without those counters fxamp reports less exact
reasons and no skipped functions.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch._dynamo.callback import callback_handler, on_compile_start
from torch._dynamo.utils import counters
from torch.fx import GraphModule

#: The counts of Dynamo's messages when the current compilation started.
_before: Counter[str] = Counter()

_EXPLANATION = re.compile(r"^ *Explanation: (\S.*)$", re.MULTILINE)
_SKIPPED = re.compile(r"frame skipped: (?P<name>\S+) \((?P<file>.*) line (?P<line>\d+)\)")


def why_ended(gm: GraphModule) -> str:
    """Return the reason and location of the graph break that ended ``gm``; ``""`` if the program returned there.

    Call it while ``gm`` is being compiled.
    """
    fresh = _fresh()
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    where = f"{reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}: " if reason.user_stack else ""
    given = str(reason.reason).strip()
    explained = [given] if "Explanation:" in given else fresh or [given]
    return where + " or ".join(dict.fromkeys(map(_first, explained)))


def skipped_functions(compiled: Any) -> list[str]:
    """List the functions of ``compiled``, a module or function, that Dynamo skips, with location and reason."""
    found = []
    codes = {(code.co_filename, code.co_firstlineno) for code in _codes(compiled)}
    for message in _messages():
        frame = _skipped(message)
        if frame is not None and (frame["file"], int(frame["line"])) in codes:
            found.append(f"{frame['file']}:{frame['line']}: {frame['name']}: {_first(message)}")
    return list(dict.fromkeys(found))


def failed_compilations(compiled: Any) -> list[str]:
    """List what Dynamo says of graphs of ``compiled`` that fxamp failed to compile, as for ops without a fake."""
    places = {f'File "{code.co_filename}", line' for code in _codes(compiled)}
    failed = [message for message in _messages() if "Backend compiler `fxamp` failed" in message]
    return list(dict.fromkeys(_first(message) for message in failed if any(place in message for place in places)))


def _begin(*_: object) -> None:
    _before.clear()
    _before.update(_messages())


on_compile_start(_begin)


def _fresh() -> list[str]:
    """Return the messages of this compilation, except those that led to a skipped function.

    ``torch._dynamo.reset`` removes the callback, so the first graph after a reset includes messages of earlier frames.
    """
    messages = _messages()
    fresh = [message for message, count in messages.items() if count > _before[message]]
    skipped = [message for message in fresh if _skipped(message)]
    _begin()
    if _begin not in callback_handler.start_callbacks:
        on_compile_start(_begin)
    return [message for message in fresh if not any(other.startswith(message) for other in skipped)]


def _messages() -> Counter[str]:
    return Counter(counters["unimplemented"])


def _skipped(message: str) -> re.Match[str] | None:
    return _SKIPPED.search(message)


def _first(message: str) -> str:
    """Return a message's explanation, the first one if one break led to another; else its first line."""
    explained = _EXPLANATION.search(message)
    return explained[1] if explained else message.strip().splitlines()[0].strip()


def _codes(compiled: Any) -> Iterator[CodeType]:
    """Yield the code of a function, or of all methods of a module and its submodules."""
    if not isinstance(compiled, torch.nn.Module):
        code = getattr(getattr(compiled, "_torchdynamo_orig_callable", compiled), "__code__", None)
        return iter(() if code is None else (code,))
    classes = {kind for module in compiled.modules() for kind in type(module).__mro__ if kind is not torch.nn.Module}
    return _code_of(value for kind in classes for value in vars(kind).values())


def _code_of(values: Iterable[Any]) -> Iterator[CodeType]:
    return (value.__code__ for value in values if isinstance(getattr(value, "__code__", None), CodeType))
