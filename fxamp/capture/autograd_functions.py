"""Recover the arguments of ``custom_fwd`` and ``custom_bwd`` for an autograd.Function that Dynamo inlined.

Dynamo runs the decorators while tracing and keeps only their effect under the current autocast state. Without autocast
they have no effect, so the request ``cast_inputs=torch.float32`` would be lost. The class still exists, so fxamp finds
it by the code object that the traced nodes refer to, and reads its decorators.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import unwrap
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxamp.errors import CaptureError
from fxamp.graph import SourceFrame, source_frames
from fxamp.torch_private import is_custom_fwd


@dataclass(frozen=True)
class CustomAutocast:
    """The decorators of one Function: their device, ``cast_inputs``, and whether the backward is decorated."""

    device: str
    cast_inputs: torch.dtype | None
    decorated_backward: bool

    def __str__(self) -> str:
        arguments = f'device_type="{self.device}", cast_inputs={self.cast_inputs}'
        return f"custom_fwd({arguments}){', custom_bwd' if self.decorated_backward else ''}"


def custom_autocast(*traced: GraphModule) -> CustomAutocast | None:
    """Return the ``custom_fwd``/``custom_bwd`` arguments of the Function that the ``traced`` bodies come from.

    None for an undecorated Function, or if no node of the bodies has a source location. Functions that its methods call
    do not count.
    """
    codes, nodes = _all_codes(), [node for gm in traced for node in gm.graph.nodes]
    return _request_at({frame for node in nodes for frame in _outermost(source_frames(node), codes)})


def marks_dirty(forward: GraphModule) -> bool:
    """Whether the Function that ``forward`` comes from calls ``ctx.mark_dirty``; True if its class is unknown."""
    frames = {frame for node in forward.graph.nodes for frame in source_frames(node)}
    methods = [
        _code(getattr(function, name)) for function in _functions_at(frames) for name in ("forward", "setup_context")
    ]
    return not methods or any("mark_dirty" in code.co_names for code in methods if code is not None)


@dataclass(frozen=True)
class InlinedCall:
    """A call of a Function with ``cast_inputs`` that Dynamo inlined entirely, because no gradient is needed.

    ``frames`` lead to the call, outermost first; the calls of a loop have the same.
    """

    request: CustomAutocast
    frames: tuple[SourceFrame, ...]


def inlined_call(node: Node, in_function: bool) -> InlinedCall | None:
    """Return the outermost such call around ``node``: ``custom_fwd`` casts nothing inside of another one's forward.

    ``in_function``: the node is in a body of a Function, which itself does not count.
    """
    frames = source_frames(node)
    if not _decorated(frames):
        return None
    frames = frames[len(_outermost(frames, _all_codes())) :] if in_function else frames
    starts = [at for at, frame in enumerate(frames) if is_custom_fwd(frame.file, frame.function)]
    for start, end in pairwise((*starts, len(frames))):
        request = _request_at(set(frames[start:end]))
        if request is not None and request.cast_inputs is not None:
            return InlinedCall(request, tuple(frames[: start + 1]))
    return None


def _all_codes() -> list[CodeType]:
    """Return the code of the methods of all Functions."""
    return [code for function in _subclasses(torch.autograd.Function) for code in _codes(function)]


def _outermost(frames: Sequence[SourceFrame], codes: Sequence[CodeType]) -> Sequence[SourceFrame]:
    """Return the frames down to the first method of a Function, whose code is among ``codes``."""
    for at, frame in enumerate(frames):
        if any(_within(frame, code) for code in codes):
            return frames[: at + 1]
    return frames


def _request_at(frames: set[SourceFrame]) -> CustomAutocast | None:
    """Return the request of the Function whose code the frames are in; several may share one ``forward``.

    Raises CaptureError if they ask for different casts, and the frames do not say which of them runs.
    """
    requests = {_request(*_methods(function)) for function in _functions_at(frames)}
    if len(requests) > 1:
        requests = {request for request in requests if (request is not None) == _decorated(frames)}
    if len(requests) > 1:
        raise CaptureError(
            "autograd.Functions that share the code of one forward ask for different casts "
            f"({' and '.join(sorted(str(request or 'no custom_fwd') for request in requests))}); "
            "accepted: a forward of its own for each, or calls under torch.autocast"
        )
    return next(iter(requests), None)


def _decorated(frames: Iterable[SourceFrame]) -> bool:
    return any(is_custom_fwd(frame.file, frame.function) for frame in frames)


def _functions_at(frames: set[SourceFrame]) -> Iterator[type]:
    for function in _subclasses(torch.autograd.Function):
        if any(_within(frame, code) for frame in frames for code in _codes(function)):
            yield function


def _methods(function: type) -> tuple[Any, Any]:
    """Return its own forward and backward."""
    methods = [vars(function).get(name) for name in ("forward", "backward")]
    forward, backward = (method.__func__ if isinstance(method, staticmethod) else method for method in methods)
    return forward, backward


def _codes(function: type) -> list[CodeType]:
    codes = map(_code, _methods(function))
    return [code for code in codes if code is not None]


def _subclasses(cls: type) -> Iterator[type]:
    direct: list[type] = cls.__subclasses__()
    for function in direct:
        yield function
        yield from _subclasses(function)


def _code(function: Any) -> CodeType | None:
    return getattr(unwrap(function), "__code__", None)


def _within(frame: SourceFrame, code: CodeType) -> bool:
    if frame.file != code.co_filename or frame.function != code.co_name:
        return False
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return min(lines) <= frame.line <= max(lines)


def _request(forward: Any, backward: Any) -> CustomAutocast | None:
    cells = _decorator_cells(forward, "decorate_fwd")
    if cells is None:
        return None
    decorated_backward = _decorator_cells(backward, "decorate_bwd") is not None
    return CustomAutocast(str(cells["device_type"]), cells.get("cast_inputs"), decorated_backward)


def _decorator_cells(function: Any, name: str) -> dict[str, Any] | None:
    """Return the closure of torch.amp's decorator ``name``, anywhere in a chain of decorators."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_name == name and code.co_filename == torch.amp.autocast_mode.__file__:
            cells = function.__closure__ or ()
            return {free: cell.cell_contents for free, cell in zip(code.co_freevars, cells, strict=True)}
        function = getattr(function, "__wrapped__", None)
    return None
