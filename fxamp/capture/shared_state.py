"""Let a rewritten graph share its source's parameters and buffers: the same tensors, under the same names."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxamp.graph import first_computation
from fxamp.graph.submodules import all_paths, first_names, named_buffers, named_parameters


def share_state(rewritten: GraphModule, source: nn.Module) -> None:
    """Give ``rewritten`` the parameters and buffers of ``source``, under the same names and in the same order.

    Its ``state_dict`` then has the source's keys; other tensors that ``rewritten`` holds are not in it.
    """
    for _, owner in rewritten.named_modules():
        owner._non_persistent_buffers_set.update(owner._buffers)
    for path, module in all_paths(source):
        owner = _submodule(rewritten, path)
        for name in (*module._parameters, *module._buffers):
            vars(owner).pop(name, None)
            owner._parameters.pop(name, None)
            owner._buffers.pop(name, None)
        for name, parameter in module._parameters.items():
            owner.register_parameter(name, parameter)
        for name, buffer in module._buffers.items():
            owner.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
        for name in module._modules:
            owner._modules[name] = owner._modules.pop(name, None) or nn.Module()


def read_state(rewritten: GraphModule, source: nn.Module, inputs: Sequence[Any]) -> list[int]:
    """Replace the placeholders of ``rewritten`` that are tensors of ``source`` by attributes of ``rewritten``.

    ``inputs`` are the placeholders' values. Returns the positions of the placeholders that stay.
    """
    names = {id(tensor): name for name, tensor in state_of(source).items()}
    placeholders = rewritten.graph.find_nodes(op="placeholder")
    left = [at for at, value in enumerate(inputs) if id(value) not in names]
    first = first_computation(rewritten.graph)
    for node, value in zip(placeholders, inputs, strict=True):
        if id(value) in names:
            _read(node, names[id(value)], first)
    return left


def _read(placeholder: Node, name: str, before: Node) -> None:
    with placeholder.graph.inserting_before(before):
        read = placeholder.graph.get_attr(name)
    read.meta.update(placeholder.meta)
    placeholder.replace_all_uses_with(read)
    placeholder.graph.erase_node(placeholder)


def state_of(source: nn.Module) -> dict[str, Tensor]:
    """Return each parameter and buffer by its first name."""
    return first_names([*named_parameters(source), *named_buffers(source)])


def _submodule(root: nn.Module, path: str) -> nn.Module:
    owner = root
    for name in filter(None, path.split(".")):
        owner = owner._modules[name] or nn.Module()
    return owner
