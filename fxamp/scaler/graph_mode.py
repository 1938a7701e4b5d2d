"""The backend's side of a scaler: what compiled backwards read and report, and how its numbers read meanwhile."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxamp.errors import OptionError
from fxamp.scaler.compressed import refuse_float16_buckets
from fxamp.scaler.float16_flow import begin
from fxamp.scaler.graph_flags import GraphFlags, Owner
from fxamp.scaler.untraced import untraced
from fxamp.torch_private import running_wrapper


class GraphMode(torch.amp.GradScaler):
    """A scaler that may be given to the backend; see :class:`fxamp.scaler.GradScaler`."""

    _graph: GraphFlags | None = None
    _scaled_losses = False
    graph_norm = False

    @untraced
    def get_scale(self) -> float:
        """Return the factor that ``scale`` multiplies losses by, which gradients hold before ``unscale_``.

        That is 1.0 if the scaler is disabled, or given to the backend: a loop that divides by it stays right. Waits for
        the device.
        """
        return 1.0 if self._graph is not None else super().get_scale()

    @property
    @untraced
    def loss_scale(self) -> float:
        """The scale, wherever it is applied: to losses, or inside compiled backwards; waits for the device."""
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state: ``scale`` (the :attr:`loss_scale`), the rule of its growth, and ``_growth_tracker``."""
        state = super().state_dict()
        return state | {"scale": self.loss_scale} if state else state

    def attach(self) -> None:
        """Let compiled backwards scale, unscale and check from now on; they report by :meth:`record_graph_flags`.

        Raises:
            OptionError: a loss was multiplied by the scale since the last update: nobody would divide its gradients.
        """
        if self._graph is not None:
            return
        if self._scaled_losses:
            raise OptionError(
                "the scaler was given to the backend after it had scaled a loss itself, whose gradients it would no "
                "longer unscale; call update() before, or attach() as soon as the scaler is made"
            )
        self._graph = GraphFlags()

    def graph_runs(self) -> None:
        """Take note of what surrounds a compiled graph, whose forward begins."""
        wrapper = running_wrapper()
        if wrapper is not None and self._graph is not None:
            self._graph.wrappers.add(wrapper)

    def graph_scale(self, device: torch.device) -> Tensor:
        """Return the scale, 0-dim float32 on ``device``; made if need be, and 1.0 if the scaler is disabled."""
        if not self._enabled:
            return torch.ones((), dtype=torch.float32, device=device)
        return self._scale_on(device)

    def record_graph_flags(
        self, parameters: Sequence[Owner], flags: Tensor, gradients: Sequence[Tensor], square: Tensor | None = None
    ) -> None:
        """Take what one compiled backward found; waits for no device.

        Args:
            parameters: for each flag the parameter its gradient belongs to, a weak reference to it, or None for a
                gradient that no parameter owns; its flag counts for every optimizer.
            flags: bool or int32 ``[len(parameters)]``; nonzero for a gradient that holds an inf or NaN.
            gradients: the true gradients, as they are returned to autograd. They are not kept alive; a parameter whose
                ``.grad`` is another tensor at the step, or was written to, is checked again.
            square: the sum of the squares of all these gradients, 0-dim float32; None if it is not known.

        Raises:
            OptionError: the scaler is not attached to a backend, or the lengths differ.
        """
        if not self._enabled:
            return
        if self._graph is None:
            raise OptionError("record_graph_flags: call attach() first, so that scale() leaves losses to the graph")
        if flags.shape != (len(parameters),) or len(gradients) != len(parameters):
            raise OptionError(
                f"record_graph_flags: {len(parameters)} parameters, {len(gradients)} gradients, flags of shape "
                f"{tuple(flags.shape)}"
            )
        with torch.no_grad():
            self._graph.record(parameters, flags, gradients, square)

    def _scale_on(self, device: torch.device) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale.to(device, non_blocking=True)

    def _scale_one(self, output: Tensor) -> Tensor:
        scale = self._scale_on(output.device)
        if self._graph is not None:
            refuse_float16_buckets(self._graph.wrappers)
            return begin(output, self)
        self._scaled_losses = True
        return output * scale
