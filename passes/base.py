"""The base of all passes: a frozen dataclass that states what it requires, runs, and states what it ensures."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from fxamp.graph import all_graphs
from fxamp.policy import Policy
from fxamp.torch_private import without_autocast
from fxamp.torch_private.parts.fx import enable_python_dispatcher, tracing


@dataclass(frozen=True)
class Context:
    """What every pass can read besides the graph: ``mode``, the fake mode that owns every value in the graph."""

    mode: FakeTensorMode

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside this context, ops on the graph's values compute new values, as in eager mode without autocast.

        ATen's composite ops would ask for sizes as numbers and specialize symbolic sizes; the Python dispatcher avoids
        that.
        """
        with ExitStack() as stack:
            for context in (tracing(None), without_autocast(), torch.no_grad(), self.mode):
                stack.enter_context(context)
            if self.mode.shape_env is not None:
                stack.enter_context(enable_python_dispatcher())
            yield


@dataclass(frozen=True)
class CastContext(Context):
    """What passes that decide on dtypes can read besides.

    ``policy`` is resolved for this device and this torch. ``captured_autocast`` is the dtype of the autocast that the
    program was captured under, None if there was none. ``every_device`` makes tensors of all devices eligible, so that
    a GPU's policy can be inspected on a machine without a GPU. ``only_regions``: if not None, the policy applies only
    in the program's autocast regions, and this is the dtype of regions that name none. ``lstm_kernel``: nn.LSTM may use
    oneDNN's kernel, as in eager mode; AOTAutograd cannot trace that kernel's backward. ``narrow_outputs``: outputs that
    were captured in 16 bits are returned in that dtype, because the program continues with them. ``ended``: the reason
    for the graph break that ended the graph, if there was one. ``called_by``: the function inside the compiled call
    that calls the graph, if the program does not call it itself. ``any_attention_kernel``: attention may run in another
    kernel than eager mode chooses for the captured call, which rounds differently.
    """

    policy: Policy
    captured_autocast: torch.dtype | None = None
    every_device: bool = False
    only_regions: torch.dtype | None = None
    lstm_kernel: bool = True
    narrow_outputs: bool = True
    ended: str = ""
    called_by: str = ""
    any_attention_kernel: bool = False

    @property
    def lower(self) -> torch.dtype:
        """Return the policy's lower-precision dtype."""
        dtype: torch.dtype = getattr(torch, self.policy.lower_precision_fp)
        return dtype

    @property
    def read_inside(self) -> str:
        """Why code inside the compiled call reads the results; ``""`` if they are what the call returns."""
        if self.ended:
            return f"a graph break ends its graph ({self.ended})"
        return f"{self.called_by} calls its graph and may read it" if self.called_by else ""

    def eligible(self, value: object) -> bool:
        """Whether autocast may cast ``value``: a floating-point tensor on the policy's device, but not float64."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype is torch.float64:
            return False
        return self.every_device or value.device.type == self.policy.device


#: The context that a pass needs. It is contravariant: a pass for ``Context`` also runs with a ``CastContext``.
ContextT = TypeVar("ContextT", bound=Context, contravariant=True)


@dataclass(frozen=True)
class Result:
    """What a pass did: the number of changes, and named counts for reports."""

    modified: int
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass(ABC, Generic[ContextT]):
    """A graph-rewriting pass. Subclasses are frozen dataclasses; their fields are the pass's options."""

    name: ClassVar[str]

    def requires(self, gm: GraphModule, context: ContextT) -> str | None:
        """Return what is missing before the pass can run, or None."""
        return None

    @abstractmethod
    def run(self, gm: GraphModule, context: ContextT) -> Result:
        """Rewrite the graph of ``gm`` in place. The runner generates its code."""

    def ensures(self, gm: GraphModule, context: ContextT) -> str | None:
        """Return how the result violates the pass's guarantee, or None. Reads only the result."""
        return None


def broken_by(what: str, nodes: Iterable[Node]) -> str | None:
    """Return what :meth:`Pass.ensures` returns if ``nodes`` break a promise: ``what``, and their names."""
    names = ", ".join(node.name for node in nodes)
    return f"{what}: {names}" if names else None


@dataclass(frozen=True)
class GraphwisePass(Pass[ContextT]):
    """A pass that rewrites a graph and the bodies of its higher-order ops, each by itself.

    ``counted``: the name of the number of changes in reports; "" for none.
    """

    counted: ClassVar[str] = ""

    def run(self, gm: GraphModule, context: ContextT) -> Result:
        modified = sum(self.rewrite(graph, context) for graph in all_graphs(gm))
        return Result(modified, {self.counted: modified} if self.counted else {})

    @abstractmethod
    def rewrite(self, gm: GraphModule, context: ContextT) -> int:
        """Rewrite one graph in place, but not the bodies in it; return the number of changes."""


@dataclass(frozen=True)
class TracedPass(Pass[ContextT]):
    """A pass over a graph of AOTAutograd's, whose ops rely on the strides that it was traced with.

    After the pass, the runner restores these strides wherever an op or an output would read other ones.
    """

    @property
    def outputs(self) -> int | None:
        """The number of leading outputs that keep their positions; None for all old ones: new ones come last."""
        return None

    def relies(self, reader: Node) -> bool:
        """Whether ``reader`` must read the strides that it was traced with."""
        return True
