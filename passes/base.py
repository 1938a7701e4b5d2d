"""What every pass is: a frozen dataclass that states what it requires, runs, and states what it ensures."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from fxamp.graph import subgraphs
from fxamp.policy import Policy


@dataclass(frozen=True)
class Context:
    """What a pass may read besides the graph.

    ``policy`` is resolved for this device and this torch. ``mode`` owns every value in the graph.
    ``captured_autocast`` is the dtype of the autocast under which the program was captured, None if there was none.
    ``every_device`` makes tensors of all devices eligible, so that a GPU's policy can be read on a machine without one.
    """

    policy: Policy
    mode: FakeTensorMode
    captured_autocast: torch.dtype | None = None
    every_device: bool = False

    @property
    def lower(self) -> torch.dtype:
        """The policy's lower-precision dtype."""
        dtype: torch.dtype = getattr(torch, self.policy.lower_precision_fp)
        return dtype

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, ops on the graph's values give new values as they would in eager mode without autocast.

        ATen's composite ops ask for sizes as numbers, which symbolic sizes refuse; the Python dispatcher's do not.
        """
        with ExitStack() as stack:
            for context in (tracing(None), torch._C._DisableAutocast(), torch.no_grad(), self.mode):
                stack.enter_context(context)
            if self.mode.shape_env is not None:
                stack.enter_context(enable_python_dispatcher())
            yield

    def eligible(self, value: object) -> bool:
        """Whether autocast may cast ``value``: a floating-point tensor of the policy's device, but not float64."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype is torch.float64:
            return False
        return self.every_device or value.device.type == self.policy.device


@dataclass(frozen=True)
class Result:
    """What a pass did: how many places it changed, and named counts worth reporting."""

    modified: int
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass(ABC):
    """A graph-rewriting pass. Subclasses are frozen dataclasses whose fields are the pass's options."""

    name: ClassVar[str]

    def requires(self, gm: GraphModule, context: Context) -> str | None:
        """What is missing before the pass may run, or None."""
        return None

    @abstractmethod
    def run(self, gm: GraphModule, context: Context) -> Result:
        """Rewrite ``gm`` in place."""

    def ensures(self, gm: GraphModule, context: Context) -> str | None:
        """What the result lacks of the pass's promise, or None. Reads only the result."""
        return None


def all_graphs(gm: GraphModule) -> Iterator[GraphModule]:
    """``gm`` and, depth first, the bodies of its higher-order ops."""
    yield gm
    for node in list(gm.graph.nodes):
        for _, body in subgraphs(node):
            yield from all_graphs(body)
