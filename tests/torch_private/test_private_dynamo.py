"""Dynamo's errors, guards, sizes and compiled callables are as fxamp takes them to be."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends import debugging
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters
from torch._functorch import partitioners

from fxamp import torch_private as private


def test_a_guard_recompiles_and_is_asked_on_each_call() -> None:
    graphs: list[Any] = []
    state = {"version": 0}

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Any:
        version = state["version"]
        private.guard_current_graph("__version_is_unchanged", lambda: state["version"] == version)
        graphs.append(gm)
        return gm.forward

    function = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)
    counts = []
    for version in (0, 0, 1, 1):
        state["version"] = version
        function(torch.ones(2))
        counts.append(len(graphs))
    assert counts == [1, 1, 2, 2]
    private.guard_current_graph("__outside", lambda: False)


def test_an_untraced_function_runs_eagerly_with_what_it_calls() -> None:
    ops: list[list[str]] = []

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Any:
        ops.append([node.name for node in gm.graph.nodes if node.op.startswith("call")])
        return gm.forward

    def inner(x: Tensor) -> Tensor:
        return x.cos()

    @private.untraced
    def function(x: Tensor) -> Tensor:
        return inner(x).sin()

    def program(x: Tensor) -> Tensor:
        return function(x + 1) * 2

    counters["frames"].clear()
    compiled, x = torch.compile(program, backend=backend), torch.ones(2)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), function(x + 1) * 2)
    assert ops == [["add"], ["mul"]] and counters["frames"]["ok"] == counters["frames"]["total"] == 2


def test_the_calling_function_inside_a_compiled_call() -> None:
    calling: list[str | None] = []

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Any:
        code = private.caller_inside()
        calling.append(None if code is None else code.co_name)
        return gm.forward

    def inner(x: Tensor) -> Tensor:
        return x.cos()

    def skipped(x: Tensor) -> Tensor:
        for _ in range(2):
            x = inner(x)
            torch._dynamo.graph_break()
        return x

    @torch.no_grad()
    def broken(x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        x = x.sin()
        torch._dynamo.graph_break()
        return x.sin()

    for function in (inner, broken, skipped):
        torch._dynamo.reset()
        torch.compile(function, backend=backend)(torch.ones(2))
    assert calling == [None] * 4 + ["skipped"]
    assert private.caller_inside() is None


def test_what_is_untraced_is_found_again() -> None:
    def function(x: Tensor) -> Tensor:
        return x

    for one in (torch._dynamo.disable(function), private.untraced(function), function):
        assert private.traced(one) is function


def test_the_backend_of_a_compiled_object_is_found() -> None:
    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return gm

    module = nn.Linear(2, 2)
    assert private.backends_of_compiles() == []
    module.compile(backend=backend)

    (made,) = private.backends_of_compiles() or ()
    assert private.backend_of(module._compiled_call_impl) is made and made.compiler_fn is backend
    for compiled in (torch.compile(module, backend=backend), torch.compile(torch.add, backend=backend)):
        assert private.backend_of(compiled) in (private.backends_of_compiles() or ())
        assert private.backend_of(compiled) is not made
        assert private.backend_of(compiled).compiler_fn is backend
    assert private.backend_of(module) is None and private.backend_of(torch.add) is None


def test_an_error_passes_through_dynamo_unchanged() -> None:
    def refusing(*_: Any) -> Any:
        raise private.raised_through_dynamo(ValueError("not so"), refusing, None) from None

    with pytest.raises(ValueError, match=r"^not so$") as caught:
        torch.compile(lambda x: x + 1, backend=refusing)(torch.ones(2))
    assert type(caught.value).__qualname__ == "ValueError"


def test_the_hint_of_a_size_is_known() -> None:
    numbers: list[int | None] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        numbers.extend(private.hint(value) for value in inputs if isinstance(value, torch.SymInt))
        return gm.forward

    torch.compile(lambda x: x * x.shape[0], backend=backend, dynamic=True)(torch.ones(5, 5))
    assert numbers and set(numbers) == {5}
    assert private.hint(3) == 3


class Norm(nn.Module):
    """Its parameters and buffers stay in place; ``constant``: with a tensor that tracing makes a constant."""

    def __init__(self, constant: bool) -> None:
        super().__init__()
        self.head, self.norm, self.constant = nn.Linear(4, 4), nn.BatchNorm1d(4), constant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.head(x))
        return hidden * torch.tensor([1.0, 2.0, 3.0, 4.0]) if self.constant else hidden


@pytest.mark.parametrize("held", [0, 1])
def test_inputs_that_stay_in_place_between_calls_are_those_that_torch_reports(
    monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """So says what AOTAutograd gives to a partitioner. Tensors that a graph holds come first."""
    name = "min_cut_rematerialization_partition"
    partition, calls = getattr(partitioners, name), []

    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["static_lifetime_input_indices"])
        return partition(*args, **kwargs)

    for place in (debugging, partitioners):
        monkeypatch.setattr(place, name, noting)
    settings: dict[str, dict[str, Any]] = {
        "aot_eager": {},
        "fxamp": {"policy": "cpu-bfloat16", "lowering": "aot_eager"},
    }
    for backend, options in settings.items():
        torch._dynamo.reset()
        torch.compile(Norm(bool(held)), backend=backend, options=options)(torch.ones(2, 4))
    theirs, ours = calls
    assert len(theirs) == 7 and ours == [*range(held), *(at + held for at in theirs)]


def test_a_graph_that_is_not_dynamos_has_no_sources_to_adopt() -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(2, 2))
    private.adopt_sources(graph, graph)
    assert not hasattr(graph, "_param_name_to_source")


def test_calls_of_a_backward_are_distinguished_from_what_the_program_compiles() -> None:
    calls: list[tuple[int, bool]] = []

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Any:
        calls.append((len(gm.graph.find_nodes(op="call_method")), private.called_by_backward()))
        return gm.forward

    inner = torch.compile(lambda x: x.sin().cos().sin().cos(), backend=backend)

    @torch.compiler.disable
    def call_inner(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return call_inner(gradient).exp()

    @torch.compiler.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(hook)
        return x

    def body(x: torch.Tensor) -> None:
        outside(x.sin()).sum().backward()

    torch.compile(body, backend=backend)(torch.ones(2, requires_grad=True))
    assert {(4, False), (1, True)} < set(calls) and (4, True) not in calls


def test_the_options_of_every_call_of_torch_compile_are_known() -> None:
    def backend(gm: Any, inputs: Any, **_: Any) -> Any:
        return gm

    assert private.compile_options() == []
    torch.compile(nn.Linear(2, 2), backend=backend, options={"scaler": 1})
    torch.compile(torch.add, backend=partial(backend, options={"scaler": 2}))
    torch.compile(torch.add, backend="eager")
    assert private.compile_options() in ([{"scaler": 1}, {"scaler": 2}], [{"scaler": 2}, {"scaler": 1}])


def test_callbacks_stay_after_a_reset_and_know_what_is_skipped() -> None:
    def loops(x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
        return x + 1

    def adds(x: Tensor) -> Tensor:
        return x + 1

    events: list[Any] = []
    before = callback_handler.start_callbacks, callback_handler.end_callbacks
    try:
        private.on_each_compilation(
            lambda *_: events.append("begins"),
            lambda *_: events.append((private.compiled_code(), private.why_skipped()[:16])),
        )
        for _ in range(2):
            events.clear()
            for function in (loops, adds):
                torch.compile(function, backend="eager")(torch.ones(2))
            assert events == ["begins", (loops.__code__, "Call to `torch._"), "begins", (adds.__code__, "")]
            torch._dynamo.reset()
    finally:
        callback_handler.start_callbacks, callback_handler.end_callbacks = before
    assert private.compiled_code() is None and private.why_skipped() == ""


def test_a_forward_is_asked_for_the_casts_of_its_decorator_and_what_it_calls_is_not() -> None:
    requests: list[torch.dtype | None] = []

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Any:
        requests.extend(private.inputs_cast_by_caller(device) for device in ("cpu", "cuda"))
        return gm.forward

    inner = torch.compile(lambda x: x.sin(), backend=backend)

    class Function(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
            torch._dynamo.graph_break()
            return inner(a * b)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient, gradient

    torch.compile(lambda x: Function.apply(x, x), backend=backend)(torch.ones(2, requires_grad=True))
    assert torch.float32 in requests[::2] and set(requests[1::2]) == {None}
    requests.clear()
    torch._dynamo.reset()
    Function.apply(torch.ones(2), torch.ones(2))
    assert requests == [None, None]


def test_the_wrapper_of_custom_fwd_is_known_by_its_code_and_no_other_is() -> None:
    def method(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a

    forward = torch.amp.custom_fwd(method, device_type="cpu").__code__
    others = torch.amp.custom_bwd(method, device_type="cpu").__code__, method.__code__
    assert private.is_custom_fwd(forward.co_filename, forward.co_name)
    assert not any(private.is_custom_fwd(code.co_filename, code.co_name) for code in others)


def test_the_source_of_an_input_is_found() -> None:
    sources: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: list[Any]) -> Any:
        sources.extend(private.source_text(node) for node in gm.graph.find_nodes(op="placeholder"))
        return gm.forward

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    torch.compile(Net(), backend=backend)(torch.ones(2))
    assert set(sources) == {"L['self']._modules['layer']._parameters['weight']", "L['x']"}
    assert private.source_text(torch.fx.Graph().placeholder("x")) == ""
