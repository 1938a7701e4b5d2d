"""The scaler's link to compiled graphs: whether it is attached, and what their backwards reported since the update."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.scaler.graphs.compressed import refuse_float16_buckets
from fxamp.scaler.graphs.graph_flags import GraphFlags, Owner
from fxamp.scaler.graphs.joining import refuse_joining
from fxamp.torch_private import compile_options, running_wrapper


class GraphLink:
    """Owned by one scaler. Detached, the scaler multiplies losses itself; attached, compiled backwards scale.

    Attributes:
        flags: what the backwards reported; None while the scaler is detached.
        scaled_losses: whether the scaler has multiplied a loss itself since the last update.
    """

    def __init__(self, scaled_losses: bool = False) -> None:
        self.flags: GraphFlags | None = None
        self.scaled_losses = scaled_losses

    @property
    def attached(self) -> bool:
        """Whether compiled backwards scale, unscale and check."""
        return self.flags is not None

    def given(self, scaler: object) -> bool:
        """Whether ``scaler``, the owner, is attached; attach it if torch.compile has it, even if nothing is compiled.

        Dynamo may compile nothing of a model. Its gradients are true then, like those of a model that it compiles.
        """
        if self.attached or self.scaled_losses:
            return self.attached
        if any(options.get("scaler") is scaler for options in compile_options()):
            self.attach()
        return self.attached

    def attach(self) -> None:
        """Attach the scaler; later calls do nothing.

        Raises:
            OptionError: the scaler has multiplied a loss itself since the last update.
        """
        if self.flags is not None:
            return
        if self.scaled_losses:
            raise OptionError(
                "the scaler was given to the backend after it had scaled a loss itself; it would no longer unscale "
                "that loss's gradients. Call update() first, or call attach() right after creating the scaler"
            )
        self.flags = GraphFlags()

    def note_forward(self) -> None:
        """Remember the DistributedDataParallel whose forward is running, if any: a compiled graph runs inside it."""
        wrapper = running_wrapper()
        if wrapper is not None and self.flags is not None:
            self.flags.wrappers.add(wrapper)

    def refuse_wrappers(self) -> None:
        """Raise UnscaledError if a DistributedDataParallel around a graph sums in float16, or is inside ``join()``."""
        if self.flags is not None:
            refuse_float16_buckets(self.flags.wrappers)
            refuse_joining(self.flags.wrappers)

    @torch.no_grad()
    def record(
        self, parameters: Sequence[Owner], flags: Tensor, gradients: Sequence[Tensor], square: Tensor | None
    ) -> None:
        """Record what one compiled backward found; arguments and errors as in ``GradScaler.record_graph_flags``."""
        if self.flags is None:
            raise OptionError("record_graph_flags: call attach() first, so that scale() leaves losses to the graph")
        if flags.shape != (len(parameters),) or len(gradients) != len(parameters):
            raise OptionError(
                f"record_graph_flags: {len(parameters)} parameters, {len(gradients)} gradients, flags of shape "
                f"{tuple(flags.shape)}"
            )
        self.flags.record(parameters, flags, gradients, square)

    def clear(self) -> None:
        """Clear what was reported and scaled; the scaler stays attached."""
        self.scaled_losses = False
        if self.flags is not None:
            self.flags.clear()
