"""A report says what ran for a model or function, whoever's call the graphs were compiled in."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.programs.small_models import Forwarding, Layer, Wrapped
from torch import Tensor, nn

import fxamp
from fxamp.reports import runs

OPTIONS = {"policy": "cpu-bfloat16", "lowering": "eager"}
X = torch.ones(2, 4)


class Net(nn.Module):
    """Two graphs; the second one reads no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return hidden @ hidden.t()

    def training_step(self, x: Tensor) -> Tensor:
        return self.first(x).sum()


def compiled_net() -> Net:
    net = Net()
    net.compile(backend="fxamp", options=OPTIONS)
    return net


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="fxamp", options=OPTIONS)


def numbers(of: object) -> tuple[int, tuple[str, ...]]:
    report = fxamp.report(of)
    assert bool(report.casts) == bool(report.graphs)
    return len(report.graphs), report.outside


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_every_model_of_a_class_has_the_graphs_that_ran_for_it(lowering: str) -> None:
    nets = [Net() for _ in range(3)]
    for net in nets:
        net.compile(backend="fxamp", options={**OPTIONS, "lowering": lowering})
    expected = (2, ("unused.weight", "unused.bias"))

    nets[0](X)
    assert [numbers(net) for net in nets] == [expected, *[(0, (*_first(), *expected[1]))] * 2]
    nets[1](X)
    nets[2](X)

    assert [numbers(net) for net in nets] == [expected] * 3
    assert fxamp.report(nets[0]).breaks == fxamp.report(nets[2]).breaks != ()


def _first() -> tuple[str, ...]:
    return ("first.weight", "first.bias")


def test_a_model_wrapped_by_torch_compile() -> None:
    models = [torch.compile(Net(), backend="fxamp", options=OPTIONS) for _ in range(2)]
    for model in models:
        model(X)
    assert [numbers(model) for model in models] == [(2, ("unused.weight", "unused.bias"))] * 2


def test_compiled_methods_belong_to_their_module_too() -> None:
    """As Lightning does: it compiles the steps of the module that it is given, and calls those."""
    nets = [Net() for _ in range(2)]
    for net in nets:
        step = compiled(net.training_step)
        step(X)
        assert len(fxamp.report(step).graphs) == len(fxamp.report(net).graphs) == 1
        assert numbers(net)[1] == ("unused.weight", "unused.bias")


def test_functions_of_one_code() -> None:
    def function_of(factor: Tensor) -> Callable[[Tensor], Tensor]:
        return compiled(lambda x: x @ x.t() * factor)

    functions = [function_of(torch.ones(2)) for _ in range(3)]
    functions[0](X)
    functions[2](X)
    assert [len(fxamp.report(function).graphs) for function in functions] == [1, 0, 1]


def test_functions_that_call_one_model_in_several_graphs() -> None:
    net = Net()

    def fresh_function() -> Callable[[Tensor], Tensor]:
        return compiled(lambda x: net(x).sum() + 1)

    functions = [fresh_function() for _ in range(2)]
    for function in functions:
        function(X)
    assert len({len(fxamp.report(function).graphs) for function in functions}) == 1
    assert numbers(net)[1] == ("unused.weight", "unused.bias")


def test_a_model_that_a_compiled_function_calls() -> None:
    net, other = Net(), Net()
    compiled(lambda x: net.training_step(x) * 2)(X)
    assert numbers(net) == (1, ("unused.weight", "unused.bias")) and len(fxamp.report(other).graphs) == 0


def test_two_models_that_share_a_part() -> None:
    inner = Net()
    models = [Wrapped(inner) for _ in range(2)]
    for model in models:
        model.compile(backend="fxamp", options=OPTIONS)
        model(X)
    assert len({numbers(model) for model in models}) == 1
    assert numbers(models[1])[1] == ("inner.unused.weight", "inner.unused.bias")


class Loop(nn.Module):
    """One function, and so one graph, reads every one of the weights in turn, between two that it always reads."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.eye(4)), nn.Parameter(torch.eye(4))
        self.weights = nn.ParameterList(torch.eye(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        step = compiled(_three_products)
        for weight in self.weights:
            x = step(x, self.before, weight, self.after)
        return x


def _three_products(x: Tensor, before: Tensor, weight: Tensor, after: Tensor) -> Tensor:
    return x @ before @ weight @ after


def test_every_parameter_that_a_graph_reads_in_turn_is_read() -> None:
    model = Loop()
    with torch.no_grad():
        model(X)
    assert numbers(model) == (1, ())


def counted_walks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one with each walk over the Python stack."""
    walked: list[None] = []
    called = runs._called

    def counting(frame: Any) -> Iterator[Any]:
        walked.append(None)
        return called(frame)

    monkeypatch.setattr(runs, "_called", counting)
    return walked


def test_the_stack_is_walked_for_new_callers_and_parameters_only(monkeypatch: pytest.MonkeyPatch) -> None:
    walked = counted_walks(monkeypatch)
    first, second = compiled_net(), compiled_net()
    for _ in range(3):
        first(X)
    assert len(walked) == 2
    for _ in range(3):
        second(X)
        first(X)
    assert len(walked) == 4


def test_a_new_model_in_the_place_of_a_dead_one() -> None:
    """Its parameters may get the addresses of the dead ones."""
    gc.collect()
    gc.freeze()  # what is there already is in no collection
    for _ in range(8):
        net = compiled_net()
        net(X)
        assert numbers(net)[0] == 2
        dead = weakref.ref(net)
        del net
        gc.collect()
        assert dead() is None


def test_parameters_that_are_new_at_each_call_are_noted_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    walked = counted_walks(monkeypatch)
    monkeypatch.setattr(runs, "_MOST", 3)
    function, factors = compiled(lambda x, w: x @ w), [nn.Parameter(torch.eye(4)) for _ in range(5)]
    for weight in factors:
        function(X, weight)
    assert len(walked) == 3


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x))).sum()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_fsdp_puts_other_tensors_under_the_names_of_the_parameters() -> None:
    from torch.distributed.fsdp import fully_shard

    model = Blocks()
    for block in (model.first, model.second):
        fully_shard(block)
    fully_shard(model)
    model.compile(backend="fxamp", options=OPTIONS)
    for _ in range(2):
        model(X).backward()
    assert len(fxamp.report(model).graphs) > 0
    assert fxamp.report(model).outside == ()


class Headed(Forwarding):
    """A compiled module, whose attributes it has too, and a head of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def test_a_module_that_forwards_attributes_is_not_the_module_inside_of_it() -> None:
    wrapper = Headed(torch.compile(Layer(4), backend="fxamp", options=OPTIONS))
    wrapper(torch.ones(2, 4))
    assert numbers(wrapper) == (1, ("head.weight", "head.bias"))
    assert numbers(wrapper.inner) == (1, ())
