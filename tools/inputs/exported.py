"""Read a ``.pt2`` of torch.export, whose graph is already at the level that fxamp captures."""

import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from fxamp.errors import ListingError
from fxamp.graph import all_graphs
from fxamp.tools.common.silence import one_line
from fxamp.tools.inputs.prepare import ProgramGraph


def prepare_exported(file: str) -> ProgramGraph:
    """Return the graph of the exported program in ``file``, which the user trusts: torch runs code that it holds.

    Raises ListingError if the archive is broken, or is not from torch.export.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ListingError(f"{file}: the archive is truncated or broken: {one_line(error)}") from error
    if broken is not None:
        raise ListingError(f"{file}: the archive is broken: the checksum of {broken} is wrong")
    try:
        exported = torch.export.load(file)
    except Exception as error:
        raise ListingError(f"{file}: no program of torch.export can be read from it: {one_line(error)}") from error
    return _prepared(exported)


def _prepared(exported: ExportedProgram) -> ProgramGraph:
    module = exported.graph_module
    for graph in all_graphs(module):
        _on_cpu(graph)
    trained = {
        name: exported.state_dict[target].requires_grad
        for name, target in exported.graph_signature.inputs_to_parameters.items()
        if target in exported.state_dict
    }
    placeholders = module.graph.find_nodes(op="placeholder")
    devices = {node.name: node.meta["val"].device for node in placeholders if isinstance(node.meta.get("val"), Tensor)}
    kinds = {device.type for device in devices.values()}
    return ProgramGraph(
        "graph_0",
        module,
        [_input(node.name, node.meta.get("val"), trained) for node in placeholders],
        min(kinds - {"cpu", "meta"}, default="cpu"),
        devices={name: str(device) for name, device in devices.items() if device.type != "cpu"},
    )


def _input(name: str, value: Any, trained: Mapping[str, bool]) -> Any:
    """Return a FakeTensor like ``value``, on the CPU; it requires a gradient if a parameter ``value`` does."""
    if not isinstance(value, Tensor):
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return fresh.requires_grad_(trained.get(name, False))


def _on_cpu(gm: GraphModule) -> None:
    """Make ``gm`` run on the CPU, and store its values where capture reads them."""
    cpu = torch.device("cpu")
    for node in gm.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
        node.args, node.kwargs = map_aggregate(
            (node.args, node.kwargs), lambda value: cpu if isinstance(value, torch.device) else value
        )
    gm.recompile()
