"""Calls of torch's public functions, made of torch.testing's op database, in a few mixtures of dtypes.

The database has a sample of every function. A sample's float32 tensors go in as they are, or narrowed by a matmul, as
they are where a model calls the function.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo

#: Which of a call's float32 tensors are narrowed, by their position.
MIXTURES: dict[str, Callable[[int], bool]] = {
    "float32": lambda position: False,
    "16-bit": lambda position: True,
    "16-bit first": lambda position: position == 0,
    "16-bit but first": lambda position: position > 0,
}


@dataclass(frozen=True)
class Call:
    """A sample call of a public function: ``leaves`` are its arguments, real tensors on the CPU among them."""

    name: str
    number: int
    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: TreeSpec

    @property
    def title(self) -> str:
        """The function's name, and which of its samples."""
        return f"{self.name} #{self.number}"

    def mixtures(self) -> list[str]:
        """The mixtures that differ for this call."""
        floats = sum(isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 for leaf in self.leaves)
        return list(MIXTURES)[: 4 if floats > 1 else 1 + floats]

    def two_mixtures(self, turn: int) -> list[str]:
        """16 bits, which most depends on, and in turn one of the others."""
        every = self.mixtures()
        others = [mixture for mixture in every if mixture != "16-bit"]
        return [*(mixture for mixture in every if mixture == "16-bit"), others[turn % len(others)]]


def calls(every: bool = False, names: Sequence[str] = ()) -> Iterator[Call]:
    """Yield the first sample of every function that takes float32, or every sample; of ``names`` only, if given."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    for op in op_db:
        if torch.float32 not in op.dtypes or op.name.startswith("jiterator") or (names and op.name not in names):
            continue  # a jiterator compiles CUDA source of the user's own
        samples = _samples(op, every)
        for number, sample in enumerate(samples):
            leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
            yield Call(_name(op), number, op.op, tuple(leaves), spec)


def _samples(op: "OpInfo", every: bool) -> list[Any]:
    samples = op.sample_inputs_func(op, "cpu", torch.float32, False)
    strided = (sample for sample in samples if _is_strided(sample))
    inputs = list(strided) if every else list(islice(strided, 1))
    if isinstance(samples, Generator):
        samples.close()  # one that ends later sets the grad mode in the middle of a trace
    return inputs


def _is_strided(sample: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if _is_tensor(leaf)]
    return all(tensor.layout is torch.strided for tensor in tensors)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _name(op: "OpInfo") -> str:
    return f"{op.name} ({op.variant_test_name})" if op.variant_test_name else op.name


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """The same values, as the result of a matmul: autocast makes it in 16 bits."""
    return (x.unsqueeze(-1) @ x.new_ones(1, 1)).squeeze(-1)


def program(call: Call, mixtures: Sequence[str], device: str) -> tuple[GraphModule, list[torch.Tensor]]:
    """Return a graph that calls the function in each mixture, and its inputs, which are CPU tensors of its own."""
    graph, inputs, names = Graph(), list[torch.Tensor](), count()

    def argument(leaf: Any, narrow: bool) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device(device)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        inputs.append(leaf.detach().clone())
        node = graph.placeholder(f"x{next(names)}")
        return graph.call_function(narrowed, (node,)) if narrow else node

    results = []
    for mixture in mixtures:
        positions = count()
        leaves = [argument(leaf, _is_float32(leaf) and MIXTURES[mixture](next(positions))) for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.spec)
        results.append(graph.call_function(call.function, args, kwargs))
    graph.output(tuple(results))
    return GraphModule(torch.nn.Module(), graph), inputs


def _is_float32(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32
