"""A tiny captured graph, a policy of three rules, and one pass to run on it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp.capture import Captured, capture
from fxamp.capture.dynamo_trace import trace
from fxamp.graph import format_graph
from fxamp.optim.tracing.trace import fake_mode
from fxamp.passes.base import CastContext, Context, Pass
from fxamp.pipeline import run_passes
from fxamp.policy import Category, Policy, Rule
from fxamp.reports import PassRecord
from support.checks.golden_text import assert_golden

RULES = (
    Rule("products", Category.LOWER_PRECISION_FP, ("mm", "bmm", "linear")),
    Rule("wide", Category.FP32, ("exp", "mse_loss")),
    Rule("joins", Category.PROMOTE, ("cat",)),
)


def policy(*rules: Rule, dtype: str = "bfloat16", outputs: str = "captured") -> Policy:
    """A policy for the CPU with ``rules``, or with products in 16 bits, exp in float32 and cat promoted."""
    return Policy("test", "cpu", dtype, outputs=outputs, rules=rules or RULES)


@dataclass
class Workbench:
    """A captured program under a policy; ``run`` applies passes as the runner does."""

    captured: Captured
    context: CastContext

    def run(self, *passes: Pass) -> PassRecord:
        """Run ``passes`` in order, each with its contract; the last one's record."""
        return run_passes(self.captured, self.context, *passes)[-1]

    @property
    def text(self) -> str:
        """The graph as text."""
        return format_graph(self.captured.module)

    def golden(self, name: str, *passes: Pass) -> PassRecord:
        """Run ``passes``; compare the graph before and after with the golden text ``name``; run them again."""
        before = self.text
        result = self.run(*passes)
        after = self.text
        assert_golden(f"passes/{name}", f"before\n{before}\n\nafter\n{after}")
        assert self.run(*passes).modified == 0 and self.text == after, "a second run changes nothing"
        return result

    def assert_unchanged_by(self, *passes: Pass) -> None:
        """Run ``passes``, which leave the graph as it is."""
        assert_unchanged(self.captured.module, self.context, *passes)


def assert_unchanged(gm: GraphModule, context: Context, *passes: Pass) -> None:
    """Run passes by their contracts on any graph, which they leave as it is."""
    before = format_graph(gm)
    for record in run_passes(Captured(gm, context.mode), context, *passes):
        assert record.modified == 0 and not any(record.counts.values())
    assert format_graph(gm) == before


def traced_step(function: Callable[..., Any], *inputs: Tensor) -> tuple[GraphModule, Context]:
    """The graph of ``function``, a small step, for inputs like these, and the context of its passes."""
    mode = fake_mode()
    with mode:
        return make_fx(function)(*(mode.from_tensor(value, static_shapes=True) for value in inputs)), Context(mode)


def golden_pass(name: str, gm: GraphModule, context: Context, step: Pass, broken: str = "") -> PassRecord:
    """Run one pass by its contract on any graph, and compare the text after it with the golden text ``name``.

    A second run changes nothing. ``broken``: what the pass's promise says of the graph before it ran.
    """
    assert broken in str(step.ensures(gm, context))
    (record,) = run_passes(Captured(gm, context.mode), context, step)
    after = format_graph(gm)
    assert_golden(name, after)
    (again,) = run_passes(Captured(gm, context.mode), context, step)
    assert again.modified == 0 and format_graph(gm) == after, "a second run changes nothing"
    return record


def captured_by_dynamo(program: Callable[..., Any], *inputs: Any) -> tuple[Captured, list[Any]]:
    """What is captured of the graph that Dynamo makes of ``program`` as it is compiled, and the graph's inputs."""
    graphs: list[tuple[Captured, list[Any]]] = []

    def backend(gm: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        graphs.append((capture(gm, examples), list(examples)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, fullgraph=True)(*inputs)
    return graphs[0]


def workbench(
    program: Callable[..., Any], *inputs: Any, under: Policy | None = None, ambient: torch.dtype | None = None
) -> Workbench:
    """Capture ``program`` for ``inputs`` under the policy ``under``, inside autocast to ``ambient`` if given."""
    with torch.autocast("cpu", ambient or torch.bfloat16, enabled=ambient is not None, cache_enabled=False):
        traced = trace(program, inputs)
        captured = capture(traced.module, traced.inputs)
    return Workbench(captured, CastContext(captured.mode, under or policy(), ambient))
