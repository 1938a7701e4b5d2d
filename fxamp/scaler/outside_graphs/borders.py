"""The nodes of the autograd graph at which compiled graphs begin and end, and the dtype and scaling of gradients there.

``follow`` (float16_scaling) marks the nodes that it has visited; a border reads the mark when its backward runs.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from fxamp.torch_private import Node, compiled_by_aot, function_of, graph_metadata, of_this_process

#: Attribute of AOTAutograd's metadata of a graph: a :class:`ScaledBy`, for the scaler that scales its backward.
SCALED_BY = "fxamp_scaled_by"

#: Keys of a node's ``metadata``: the node is a border that float16 gradients cross while scaled; the node is not
#: fxamp's and already has hooks.
_WORD, _CROSSED, _HOOKED = "fxamp", "crossed", "hooked"


@dataclass(frozen=True)
class Border:
    """A node that fxamp created.

    ``way``: "graph" for a whole compiled graph. For an eager region, in forward order: "in" for its entry, "out" for
    its exit. ``scaler``: None if the scaler no longer exists. ``in_float16``: whether float16 gradients may cross it.
    ``last``: whether all its gradients are parameters'.
    """

    way: str
    scaler: Any
    in_float16: bool = True
    last: bool = False


def border_of(node: Node) -> Border | None:
    """Return the border that ``node`` is; None if fxamp did not create the node."""
    function = function_of(node)
    if function is None:
        return None
    way = getattr(function, "fxamp_border", None)
    if way is not None:
        return Border(way, node.scaler)
    for metadata in graph_metadata(function):
        scaled_by = getattr(metadata, SCALED_BY, None)
        if scaled_by is not None:
            return Border("graph", scaled_by(), scaled_by.in_float16, scaled_by.last)
    return None


class ScaledBy:
    """The value of :data:`SCALED_BY`; called, it returns the scaler, or None if that no longer exists.

    ``in_float16``: whether the graph may take or return float16 gradients; ``last``: whether those that it returns are
    all parameters'. Pickled and read again from torch's cache, it stands for the scaler for which a graph is then
    compiled.
    """

    def __init__(self, scaler: Any, in_float16: bool, last: bool) -> None:
        self._scaler = weakref.ref(scaler)
        self.in_float16, self.last = in_float16, last

    def __call__(self) -> Any:
        return self._scaler()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScaledBy":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _now_scaled_by, (self.in_float16, self.last)


def _now_scaled_by(in_float16: bool, last: bool) -> ScaledBy:
    return ScaledBy(of_this_process("scaler"), in_float16, last)


def is_custom(node: Node) -> bool:
    """Whether ``node`` belongs to a custom autograd Function, not to an operator of torch."""
    return function_of(node) is not None


def compiled_by_others(node: Node) -> bool:
    """Whether ``node`` is a graph that AOTAutograd compiled; the caller knows that the graph is not fxamp's."""
    return compiled_by_aot(function_of(node))


def note_crossed(node: Node) -> None:
    """Record that float16 gradients are scaled when they cross the border ``node``, in either direction."""
    node.metadata[_WORD] = _CROSSED


def note_hooked(node: Node) -> bool:
    """Return True at the first call for ``node``, which is when it gets its hooks."""
    first = _WORD not in node.metadata
    if first:
        node.metadata[_WORD] = _HOOKED
    return first


def crossed(node: Node) -> bool:
    """Whether float16 gradients are scaled when they cross the border ``node``.

    Raises:
        RuntimeError: the walk did not recognise the node as fxamp's, so its gradients would be scaled twice.
    """
    if node is None:
        return False
    word = node.metadata.get(_WORD)
    if word == _HOOKED:
        raise RuntimeError(
            f"fxamp does not recognise its own graphs in the autograd graph of torch {torch.__version__}; leave "
            "'scaler' out of the options: the scaler then works as torch.amp.GradScaler does"
        )
    return bool(word == _CROSSED)
