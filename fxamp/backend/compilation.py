"""The compilation of one graph, from Dynamo's graph to what a program calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule

from fxamp.backend.auto_products import products
from fxamp.backend.lowering import lower_graph
from fxamp.backend.options import Options
from fxamp.backend.participants import participants_of
from fxamp.backend.policy_choice import choose_policy, guard_policy
from fxamp.capture import capture
from fxamp.capture.autocast_setters import leaving, setters_as_regions
from fxamp.capture.autocast_state import ambient_autocast
from fxamp.graph import strip_values
from fxamp.passes.base import CastContext
from fxamp.pipeline import cast_graph
from fxamp.reports import GraphRecord
from fxamp.reports.break_reasons import calling_function, why_ended
from fxamp.reports.list_graph import list_graph
from fxamp.reports.observer import GraphObserver
from fxamp.reports.record import CastGraph
from fxamp.reports.registry import remember
from fxamp.scaler.graphs.unscaled import warn_unscaled
from fxamp.torch_dtypes import NARROW
from fxamp.torch_private import adopt_sources, source_text


class GraphCompilation:
    """Compiles Dynamo's graph ``gm`` for ``inputs``: selects its policy and participants, runs the stages.

    It holds the graph and the inputs, so nothing that lives as long as the compiled graph may keep a reference to it.
    """

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], options: Options) -> None:
        """Select the policy and the participants. Raises OptionError or PolicyError.

        Traces nothing, except for a policy that is used only if it pays, which depends on its casts.
        """
        self._gm, self._inputs, self._options, self._ended = gm, inputs, options, why_ended(gm)
        self._left = setters_as_regions(gm)
        self._observer = GraphObserver(options.dump, self._ended)
        self._choice = choose_policy(options, inputs, gm)
        if self._choice.if_it_pays:
            self._choice = self._choice.settled(products(self._cast))
        guard_policy(options, self._choice, inputs, self._left)
        if options.scaler is None:
            warn_unscaled(self._choice.policy, options.policy != "auto", inputs)
        self._participants = participants_of(self._choice.policy, options, self._observer, gm, self._ended)

    def compile(self) -> Callable[..., Any]:
        """Return the callable for the program."""
        module, record = self._rewritten()
        compiled = leaving(lower_graph(module, self._inputs, self._participants), self._left)
        record = replace(record, kept=self._participants.kept, found=self._participants.found)
        sources = [source_text(node) for node in self._gm.graph.find_nodes(op="placeholder")]
        return remember(record, self._choice.under_autocast).noting(compiled, self._inputs, sources)

    def _rewritten(self) -> tuple[GraphModule, GraphRecord]:
        """Return the graph with its casts and the participants' changes, and its record; Dynamo's if none are made."""
        if self._choice.policy is None:
            record = self._observer.uncast(self._gm, self._inputs, self._choice.why)
            if not self._participants.members:
                return self._gm, record
            captured = capture(self._gm, self._inputs)
            listing = list_graph(captured.module)
        else:
            record = self._observer.cast(self._cast, self._choice.why)
            captured, listing = self._cast.captured, record.listing
        self._participants.captured(captured, self._inputs, listing)
        strip_values(captured.module)
        adopt_sources(self._gm, captured.module)
        return captured.module, record

    @cached_property
    def _cast(self) -> CastGraph:
        """The captured graph with the casts of the policy."""
        policy = self._choice.policy
        assert policy is not None, "there is nothing to cast for"
        captured = capture(self._gm, self._inputs)
        self._observer.captured(captured)
        context = CastContext(
            captured.mode,
            policy,
            ambient_autocast(policy.device),
            only_regions=self._choice.only_regions,
            lstm_kernel=self._options.lowering == "eager" or not torch.is_grad_enabled(),
            # Before a graph break, and in a model with 16-bit parameters, the following code is traced with 16-bit
            # tensors.
            narrow_outputs=bool(self._ended) or any(map(_is_narrow, self._inputs)),
            ended=self._ended,
            called_by=calling_function(),
            any_attention_kernel=self._options.lowering == "inductor",
        )
        return cast_graph(captured, context)


def _is_narrow(value: object) -> bool:
    """Whether an input is a 16-bit parameter: the model's code would fail on wider tensors."""
    return isinstance(value, torch.nn.Parameter) and value.dtype in NARROW
