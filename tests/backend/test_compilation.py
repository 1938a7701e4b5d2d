"""The owner of one graph's compilation: what it decides once, and that it does not outlive the compilation."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.exhaustive import each_once
from torch import Tensor, nn

import fxamp
from fxamp.backend import auto_products, compilation
from fxamp.backend.compilation import GraphCompilation


class Two(nn.Module):
    """Two results, of which a caller may read one: the backward is compiled when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        return hidden, self.second(hidden)


@each_once(
    "options, lowering",
    [{"policy": "cpu-bfloat16"}, {"policy": "cpu-bfloat16", "nonfinite": "log"}, {}],
    ["eager", "aot_eager"],
)
def test_a_compiled_graph_holds_neither_its_compilation_nor_its_inputs(
    options: dict[str, Any], lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[GraphCompilation]] = []
    decide = GraphCompilation.__init__

    def noted(self: GraphCompilation, *args: Any) -> None:
        made.append(weakref.ref(self))
        decide(self, *args)

    monkeypatch.setattr(GraphCompilation, "__init__", noted)
    model = Two()
    model.compile(backend="fxamp", options={**options, "lowering": lowering})
    x = torch.ones(2, 4)
    _, second = model(x)
    gc.collect()
    assert len(made) == 1 and made[0]() is None
    second.sum().backward()
    assert model.first.weight.grad is not None


@pytest.mark.parametrize(("pays", "casts"), [(True, "cpu-bfloat16"), (False, "float32")])
def test_what_holds_is_decided_once(pays: bool, casts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a policy that must pay, whose casts tell: they are inserted once, before who takes part is known."""
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(compilation, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return real(*args)

        return call

    for name in ("choose_policy", "capture", "cast_graph", "participants_of"):
        monkeypatch.setattr(compilation, name, counted(name))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(auto_products, "FLOPS_PER_CALL", 0 if pays else 10**12)
    monkeypatch.setattr(auto_products, "FLOPS_PER_ELEMENT", 0)
    model = Two()
    model.compile(backend="fxamp", options={"lowering": "eager"})
    model(torch.ones(2, 4))
    assert [graph.policy for graph in fxamp.report(model).graphs] == [casts]
    assert calls == ["choose_policy", "capture", "cast_graph", "participants_of"]
