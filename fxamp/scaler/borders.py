"""The nodes of autograd's graph at which compiled graphs begin and end, and what is known of gradients that cross them.

``follow`` (float16_flow) leaves a word on the nodes that it has seen; a border reads it when its backward runs.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxamp.dtypes import widest_float
from fxamp.torch_private import Node, compiled_by_aot, function_of, graph_metadata

#: Attribute of AOTAutograd's metadata of a graph: a weak reference to the scaler that its backward is scaled by.
SCALED_BY = "fxamp_scaled_by"

#: Key of a node's ``metadata``, and the words there: a border that gradients in float16 cross with the scale in them; a
#: node of others that got hooks.
_WORD, _CROSSED, _HOOKED = "fxamp", "crossed", "hooked"


@dataclass(frozen=True)
class Border:
    """A node that fxamp made.

    ``way``: "graph" for a whole compiled graph; of an eager region "out" for the way out of it, and "in" for the way
    into it, as the forward goes. ``scaler``: None if it is gone.
    """

    way: str
    scaler: Any


def border_of(node: Node) -> Border | None:
    """What ``node`` is, if fxamp made it."""
    function = function_of(node)
    if function is None:
        return None
    way = getattr(function, "fxamp_border", None)
    if way is not None:
        return Border(way, node.scaler)
    for metadata in graph_metadata(function):
        scaler = getattr(metadata, SCALED_BY, None)
        if scaler is not None:
            return Border("graph", scaler())
    return None


def scaled_by(scaler: Any) -> "weakref.ref[Any]":
    """What :data:`SCALED_BY` is set to."""
    return weakref.ref(scaler)


def made_by_hand(node: Node) -> bool:
    """Whether ``node`` is of a custom autograd Function, and no operator's of torch's own."""
    return function_of(node) is not None


def compiled_by_others(node: Node) -> bool:
    """Whether ``node`` is a graph compiled by AOTAutograd, for those who know that it is none of fxamp's."""
    return compiled_by_aot(function_of(node))


def note_crossed(node: Node) -> None:
    """Gradients in float16 hold the scale when they cross the border ``node``, either way."""
    node.metadata[_WORD] = _CROSSED


def note_hooked(node: Node) -> bool:
    """Whether ``node`` is seen for the first time; it is to get its hooks then."""
    first = _WORD not in node.metadata
    if first:
        node.metadata[_WORD] = _HOOKED
    return first


def crossed(node: Node) -> bool:
    """Whether gradients in float16 hold the scale when they cross the border ``node``.

    Raises:
        RuntimeError: the node was taken for somebody else's: its gradients would be scaled twice.
    """
    if node is None:
        return False
    word = node.metadata.get(_WORD)
    if word == _HOOKED:
        raise RuntimeError(
            f"fxamp does not recognise its own graphs in autograd's graph under torch {torch.__version__}; leave "
            "'scaler' out of the options: the scaler then works as torch.amp.GradScaler does"
        )
    return bool(word == _CROSSED)


def product(value: Tensor, factor: Tensor) -> Tensor:
    """``value`` times a 0-dim float32, in float32 at least, rounded to the dtype of ``value``."""
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    return (wide * factor).to(value.dtype)


def reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, 0-dim float32: in float64, rounded once, is what torch multiplies by; mps has no float64."""
    return scale.to(widest_float(scale.device)).reciprocal().float()
