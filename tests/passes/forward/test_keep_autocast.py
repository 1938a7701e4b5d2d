"""keep-autocast: what it encloses, what it leaves, twice."""

from collections.abc import Callable
from typing import Any

import torch
from support.checks.bench_graph import captured_by_dynamo
from torch import Tensor
from torch.fx import GraphModule

from fxamp.capture import Captured
from fxamp.graph import ENTER_AUTOCAST, EXIT_AUTOCAST
from fxamp.passes.base import CastContext
from fxamp.passes.forward.keep_autocast import KeepAutocast
from fxamp.pipeline import cast_graph
from fxamp.policy import Policy


def _captured(fn: Callable[..., Any], *inputs: Tensor, enabled: bool) -> Captured:
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        return captured_by_dynamo(fn, *inputs)[0]


def _mapped(x: Tensor, w: Tensor) -> Tensor:
    return torch.vmap(lambda a: a @ w)(x) + (x @ w)


def _marks(gm: GraphModule) -> list[Any]:
    marks = (ENTER_AUTOCAST, EXIT_AUTOCAST)
    return [node.args for node in gm.graph.nodes if node.target in marks and node.target is ENTER_AUTOCAST]


def _rewritten(fn: Callable[..., Any], enabled: bool) -> tuple[Captured, CastContext]:
    captured = _captured(fn, torch.ones(3, 2, 4), torch.ones(4, 4), enabled=enabled)
    policy = Policy.load("cpu-bfloat16").resolve("cpu")
    context = CastContext(captured.mode, policy, torch.bfloat16 if enabled else None)
    cast_graph(captured, context)
    return captured, context


def test_a_transform_runs_under_the_autocast_that_it_was_captured_under() -> None:
    captured, context = _rewritten(_mapped, True)
    assert _marks(captured.module) == [("cpu", torch.bfloat16, True, False)]
    assert KeepAutocast().run(captured.module, context).modified == 0


def test_what_was_captured_without_autocast_needs_none() -> None:
    captured, _ = _rewritten(_mapped, False)
    assert not _marks(captured.module)


def test_no_match() -> None:
    captured, context = _rewritten(lambda x, w: x @ w, True)
    assert not _marks(captured.module)
    assert KeepAutocast().run(captured.module, context).modified == 0


def _with_region(x: Tensor, w: Tensor) -> Tensor:
    def inside(a: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return a @ w

    return torch.vmap(inside)(x)


def test_regions_inside_a_transform_stay() -> None:
    captured, _ = _rewritten(_with_region, True)
    assert _marks(captured.module) == [("cpu", torch.bfloat16, True, False), ("cpu", None, False, None)]
