"""A graph with its values as bytes, and back."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import snapshot_fake
from torch.utils._pytree import tree_leaves, tree_map_only

from fxamp.torch_private.tracing import without_fake_mode

#: Keys of ``node.meta`` that hold objects of the process.
_NOT_STORED = frozenset(("source_fn_stack", "fwd_source_fn_stack", "from_node", "torch_fn", "grapharg", "tensor_dict"))


def dump_graph(gm: GraphModule, inputs: Sequence[Any]) -> bytes:
    """Return ``gm`` with the values and annotations of its nodes, and its fake ``inputs``, as bytes.

    Module classes become their names, and values their layouts, which load faster than fake tensors. Views lose their
    base; an input is a view if the forward keeps it in a different layout than its value's. Raises ValueError if a
    size is dynamic, because loading it would change the sizes of the process, and pickle's own errors if something
    cannot be stored. Breaks loudly.
    """
    from torch.fx._graph_pickler import GraphPickler, Options

    with without_fake_mode():  # constants among the graph's attributes are real tensors
        stored = deepcopy(gm)
    values = [*inputs, *(node.meta.get("val") for node in stored.graph.nodes)]
    if any(map(is_dynamic, tree_leaves(values))):
        raise ValueError("it has dynamic sizes")
    text, storages = _text(stored), dict[int, int]()
    layout = partial(_layout, storages=storages)
    for node in stored.graph.nodes:
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            stack = node.meta.get(key)
            if stack:
                node.meta[key] = {at: (path, _qualified(kind)) for at, (path, kind) in stack.items()}
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(FakeTensor, layout, node.meta["val"])
    options = Options(ops_filter=None, node_metadata_key_filter=lambda key: key not in _NOT_STORED)
    return GraphPickler.dumps((stored, tree_map_only(FakeTensor, layout, list(inputs)), text), options)


def load_graph(stored: bytes, mode: FakeTensorMode) -> tuple[GraphModule, list[Any]]:
    """Return what :func:`dump_graph` stored, with values of ``mode``. Raises ValueError if it is not as it was."""
    from torch.fx._graph_pickler import GraphPickler

    gm, inputs, text = cast(tuple[GraphModule, list[Any], str], GraphPickler.loads(stored, mode))
    value = partial(_value, mode=mode, storages={})
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(_Layout, value, node.meta["val"])
    inputs = tree_map_only(_Layout, value, inputs)
    gm.recompile()
    if _text(gm) != text:
        raise ValueError("a stored graph was not restored as it was")
    return gm, inputs


@dataclass(frozen=True)
class _Layout:
    """A strided tensor without data. ``storage`` numbers the storages of a graph; ``nbytes`` is that one's size."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: int
    nbytes: int


def _layout(value: FakeTensor, storages: dict[int, int]) -> "_Layout | Tensor | None":
    """Return the layout of ``value``; ``value`` itself, without its base, if a :class:`_Layout` cannot describe it.

    ``storages`` numbers the storages, by their addresses.
    """
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return snapshot_fake(value)
    storage = value.untyped_storage()
    number = storages.setdefault(storage._cdata, len(storages))
    shape, strides, offset = tuple(value.shape), value.stride(), int(value.storage_offset())
    return _Layout(value.dtype, value.device, shape, strides, offset, number, storage.nbytes())


def _value(layout: _Layout, mode: FakeTensorMode, storages: dict[int, torch.UntypedStorage]) -> FakeTensor:
    """Return a value of ``layout``; ``storages`` are those of the values before."""
    if layout.storage not in storages:
        memory = torch.empty(layout.nbytes, dtype=torch.uint8, device="meta")
        storages[layout.storage] = memory.untyped_storage()
    empty = torch.empty(0, dtype=layout.dtype, device="meta")
    meta = empty.set_(storages[layout.storage], layout.offset, layout.shape, layout.strides)
    return FakeTensor(mode, meta, layout.device)


def is_dynamic(value: object) -> bool:
    """Whether ``value`` is a symbolic number, or a tensor with a symbolic size. Breaks loudly."""
    if isinstance(value, Tensor):
        return not all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset()))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _qualified(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def _text(gm: GraphModule) -> str:
    """Return the code of ``gm``, and of graphs inside it, with dtype, shape, strides and device of each value."""
    parts = [part for part in gm.modules() if isinstance(part, GraphModule)]
    values = [(n.name, tree_leaves(n.meta.get("val"))) for part in parts for n in part.graph.nodes]
    layouts = [(n, [(v.dtype, v.shape, v.stride(), v.device) for v in vs if isinstance(v, Tensor)]) for n, vs in values]
    return repr(([part.code for part in parts], layouts))
