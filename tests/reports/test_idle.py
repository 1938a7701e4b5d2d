"""If fxamp takes part in training and none of its graphs runs, the log says so once, with the reason and the remedy."""

import copy
import gc
import logging
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from support.checks.exhaustive import exhaustive
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

import fxamp
from fxamp.policy.model.comparisons import holds
from fxamp.reports import break_reasons

OPTIONS = {"policy": "cpu-float16", "lowering": "eager"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).relu()

    def training_step(self, x: Tensor) -> Tensor:
        return self.forward(x)


class WithCall(Net):
    """Its calls leave out what ``Module.compile`` made, as those of GPyTorch do."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Unequal(Net):
    """Cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("compared")

    __hash__ = nn.Module.__hash__


class Skipped(Net):
    """Dynamo skips a function with a graph break in a loop that it cannot resume from."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1):
            torch._dynamo.graph_break()
        return super().forward(x)


#: A model, and what the training loop calls.
Called = tuple[nn.Module, Callable[[Tensor], Tensor]]


def in_place(model: Any, scaler: fxamp.GradScaler | None) -> Any:
    model.compile(backend="fxamp", options=OPTIONS | {"scaler": scaler})
    return model


def compiled_sequential(scaler: fxamp.GradScaler) -> Called:
    model = in_place(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), scaler)
    return model, model


def compiled_wrapper(scaler: fxamp.GradScaler) -> Called:
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4)))
    model = torch.compile(wrapped, backend="fxamp", options=OPTIONS | {"scaler": scaler})
    return model, model


def another_method(scaler: fxamp.GradScaler) -> Called:
    model = in_place(Net(), scaler)
    return model, model.training_step


def a_call_of_its_own(scaler: fxamp.GradScaler) -> Called:
    model = in_place(WithCall(), scaler)
    return model, model


def the_original(scaler: fxamp.GradScaler) -> Called:
    model = Net()
    return torch.compile(model, backend="fxamp", options=OPTIONS | {"scaler": scaler}), model


def counted_first(scaler: fxamp.GradScaler) -> Called:
    """Dynamo does not compile inside of the mode, and before torch 2.14 never comes back to the function."""
    torch._dynamo.reset()
    model = in_place(Net(), scaler)
    with FlopCounterMode(display=False):
        model(torch.ones(2, 4))
    return model, model


def copied(scaler: fxamp.GradScaler, how: Callable[[Any], Any]) -> Called:
    original = in_place(Net(), scaler)
    model = how(original)
    model.original = [original]
    return model, model


def a_copy(scaler: fxamp.GradScaler) -> Called:
    return copied(scaler, copy.deepcopy)


def a_pickled_copy(scaler: fxamp.GradScaler) -> Called:
    return copied(scaler, lambda original: pickle.loads(pickle.dumps(original)))


#: torch 2.14 compiles its own modules, but not its wrappers, and what was called in a mode first.
COMPILES_MORE = holds(">=2.14", torch.__version__)

IDLE = {
    a_copy: "Net is compiled with fxamp, but did not run in the first step; a similar model trains",
    a_pickled_copy: "Net is compiled with fxamp, but did not run in the first step; a similar model trains",
    compiled_sequential: "Sequential is compiled with fxamp, .* Sequential is a class of torch",
    compiled_wrapper: "DistributedDataParallel is compiled with fxamp, .* DistributedDataParallel is a class of torch",
    another_method: "Net is compiled with fxamp, .* never called",
    a_call_of_its_own: "WithCall is compiled with fxamp, .* WithCall has a __call__ of its own",
    the_original: "Net is compiled with fxamp, .* never called",
    counted_first: "Net is compiled with fxamp, .* Or its first call was inside a TorchDispatchMode",
}
if COMPILES_MORE:
    del IDLE[compiled_sequential], IDLE[counted_first]


def train(call: Callable[[Tensor], Tensor], scaler: fxamp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        scaler.scale(call(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Leave what is there already out of garbage collections and of fxamp's search, which look at all objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_models_of_other_tests() -> None:
    gc.collect()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fxamp.reports.idle"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("enabled", exhaustive([True, False], always=[True]))
@pytest.mark.parametrize("make", IDLE, ids=lambda make: make.__name__)
def test_training_without_a_graph_warns_once(make: Callable, enabled: bool, caplog: pytest.LogCaptureFixture) -> None:
    scaler = fxamp.GradScaler("cpu", enabled=enabled)
    model, call = make(scaler)

    train(call, scaler, torch.optim.SGD(model.parameters(), lr=0.1))

    (message,) = warnings(caplog)
    assert re.search(IDLE[make], message), message


@pytest.mark.parametrize("whole", [True, False], ids=["model", "method"])
def test_a_model_with_its_own_call_is_compiled_as_the_warning_advises(
    whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = fxamp.GradScaler("cpu")
    model, options = WithCall(), {"backend": "fxamp", "options": OPTIONS | {"scaler": scaler}}
    if whole:
        call = compiled = torch.compile(model, **options)
    else:
        call, compiled = model, torch.compile(model.forward, **options)
        model.forward = compiled

    train(call, scaler, torch.optim.SGD(model.parameters(), lr=0.1))

    assert len(fxamp.report(compiled).graphs) == 1 and warnings(caplog) == []


def test_models_are_told_apart_without_a_comparison(caplog: pytest.LogCaptureFixture) -> None:
    models = [Unequal() for _ in range(3)]
    for model in models:
        model.compile(backend="fxamp", options=OPTIONS)
    optimizer = torch.optim.SGD(models[-1].parameters(), lr=0.1)
    models[-1].training_step(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    (message,) = warnings(caplog)
    assert message.startswith("Unequal is compiled with fxamp")


@pytest.mark.skipif(not COMPILES_MORE, reason="torch 2.14 compiles modules of torch.nn, older ones do not")
def test_a_module_of_torch_is_compiled_itself(caplog: pytest.LogCaptureFixture) -> None:
    scaler = fxamp.GradScaler("cpu")
    model, call = compiled_sequential(scaler)

    train(call, scaler, torch.optim.SGD(model.parameters(), lr=0.1))

    assert len(fxamp.report(model).graphs) == 1 and warnings(caplog) == []


@pytest.mark.parametrize("make", [make for make in IDLE if make not in (a_pickled_copy, compiled_wrapper)])
def test_any_optimizer_triggers_the_warning(make: Callable, caplog: pytest.LogCaptureFixture) -> None:
    model, call = make(None)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())):
        for _ in range(2):
            call(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    (message,) = warnings(caplog)
    assert re.search(IDLE[make], message), message


def test_a_step_that_only_fills_its_state_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = another_method(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # there are no gradients
    model.training_step(torch.ones(2, 4)).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert warnings(caplog) == []

    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert len(warnings(caplog)) == 1


def test_a_traced_step_is_traced_as_without_fxamp() -> None:
    def ops() -> list[list[str]]:
        torch._dynamo.reset()
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        graphs: list[list[str]] = []

        def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
            graphs.append([str(node.target) for node in gm.graph.nodes])
            return gm

        torch.compile(torch.optim.SGD([weight], lr=0.1).step, backend=backend)()
        return graphs

    hooked = ops()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("torch.optim.optimizer"), "_global_optimizer_post_hooks", OrderedDict())
        assert ops() == hooked != []


def hooked() -> nn.Module:
    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    body[0].register_full_backward_hook(lambda *_: None)
    return body


def averaging() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))


class InSegments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


class Around(Net):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


BROKEN = {
    hooked: "forward: Module-level backwards hooks require compiled autograd",
    averaging: r"forward: Unsupported Tensor.item\(\) call.*: Dynamo does not support tracing `Tensor.item\(\)`",
    InSegments: "forward: .*`checkpoint_sequential`",
}


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_a_break_before_the_first_op_is_named(make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    model = make() if make is InSegments else Around(make())
    model.compile(backend="fxamp", options=OPTIONS | {"policy": "cpu-bfloat16"})
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())):
        model(torch.rand(2, 4, requires_grad=True)).sum().backward()
        optimizer.step()

    (message,) = warnings(caplog)
    expected = (
        "Dynamo ended its graph before the first op, and skips the functions called there: .*test_idle.py:[0-9]+: "
    )
    assert re.search(expected + BROKEN[make], message), message
    assert re.search(
        r"(?s)none of it\..*ended the graph.*\n  .*test_idle.py.*" + BROKEN[make], str(fxamp.report(model))
    )


def test_a_function_whose_graph_breaks_before_the_first_op_is_named(caplog: pytest.LogCaptureFixture) -> None:
    body = hooked()
    step = torch.compile(lambda x: body(x), backend="fxamp", options=OPTIONS | {"policy": "cpu-bfloat16"})
    step(torch.ones(2, 4, requires_grad=True)).sum().backward()
    torch.optim.SGD(body.parameters(), lr=0.1).step()

    (message,) = warnings(caplog)
    assert "test_a_function_whose" in message and "Module-level backwards hooks" in message


def test_a_break_before_a_graph_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    class Printing(Net):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model = Printing()
    model.compile(backend="fxamp", options=OPTIONS | {"policy": "cpu-bfloat16"})
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert warnings(caplog) == []


def test_a_switch_is_named(caplog: pytest.LogCaptureFixture) -> None:
    scaler = fxamp.GradScaler("cpu")
    model = Net()
    model.compile(backend="fxamp", options=OPTIONS | {"scaler": scaler})

    with torch._dynamo.config.patch(disable=True):
        train(model, scaler, torch.optim.SGD(model.parameters(), lr=0.1))

    (message,) = warnings(caplog)
    assert "TORCH_COMPILE_DISABLE" in message


def test_skipped_functions_are_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Skipped()
    optimizer = fxamp.compile_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), lowering="aot_eager")
    model.compile(backend="fxamp", options=OPTIONS)
    monkeypatch.setattr(break_reasons, "skipped_functions", lambda compiled: ["net.py:1: forward: a loop"])
    monkeypatch.setattr("fxamp.reports.idle.skipped_functions", break_reasons.skipped_functions)

    model.body(torch.ones(2, 4)).sum().backward()
    optimizer.step()

    (message,) = warnings(caplog)
    assert "Dynamo skips net.py:1: forward: a loop" in message


class Sparse(nn.Module):
    """AOTAutograd cannot trace the backward of an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True, padding_idx=0)

    def forward(self, at: Tensor) -> Tensor:
        return self.table(at).relu()


def test_a_graph_that_cannot_be_compiled_is_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = Sparse()
    model.compile(backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": "aot_eager"})
    scaler, optimizer = fxamp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)

    scaler.scale(model(torch.ones(2, 2, dtype=torch.int64)).sum()).backward()
    scaler.step(optimizer)

    (message,) = warnings(caplog)
    assert "Backend compiler `fxamp` failed with aten." in message and "never called" not in message


def test_a_compiled_optimizer_warns_too(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizers = Net(), []
    model.compile(backend="fxamp", options=OPTIONS)
    copied = copy.deepcopy(model)
    copied.compile(backend="fxamp", options=OPTIONS)
    for net in (model, copied):
        optimizers.append(fxamp.compile_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), lowering="aot_eager"))

    model.training_step(torch.ones(2, 4)).sum().backward()
    copied(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()

    assert len(warnings(caplog)) == 1


def plain(options: dict) -> Callable[[Tensor], Tensor]:
    return Net()


def compiled_whole(options: dict) -> Callable[[Tensor], Tensor]:
    model = Net()
    model.compile(backend="fxamp", options=options)
    return model


def compiled_copy(options: dict) -> Callable[[Tensor], Tensor]:
    model = copy.deepcopy(compiled_whole(options))
    assert model._compiled_call_impl is None
    model.compile(backend="fxamp", options=options)
    return model


def compiled_average(options: dict) -> Callable[[Tensor], Tensor]:
    average = torch.optim.swa_utils.AveragedModel(compiled_whole(options))
    average.module.compile(backend="fxamp", options=options)
    return average


def returned_for_a_module_of_torch(options: dict) -> Callable[[Tensor], Tensor]:
    return torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="fxamp", options=options)


def compiled_inside(options: dict) -> Callable[[Tensor], Tensor]:
    model = nn.Sequential(Net(), nn.Linear(4, 4))
    model[0].compile(backend="fxamp", options=options)
    return model


def other_backend(options: dict) -> Callable[[Tensor], Tensor]:
    model = nn.Sequential(nn.Linear(4, 4))
    model.compile(backend="eager")
    return model


def test_the_search_runs_only_where_no_graph_of_something_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager model among compiled ones; ``beside`` has the graph of ``model``, and settings that compare equal."""
    model, beside, alone = Net(), Net(), Net()
    for one in (model, beside):
        one.compile(backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": "eager"})
    searches: list[None] = []
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(None) or [])

    counts = []
    for trained in (model, beside):
        for one in (trained, alone):
            one(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        counts.append(len(searches))
    assert counts == [1, 1]


RIGHT = [
    plain,
    compiled_whole,
    compiled_copy,
    compiled_average,
    returned_for_a_module_of_torch,
    compiled_inside,
    other_backend,
]


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_there_is_no_warning_where_nothing_is_wrong(make: Callable, caplog: pytest.LogCaptureFixture) -> None:
    beside = nn.Sequential(nn.Linear(4, 4))
    beside.compile(backend="fxamp", options=OPTIONS)
    scaler = fxamp.GradScaler("cpu", init_scale=2.0)
    model = make(OPTIONS | {"scaler": scaler})

    with caplog.at_level(logging.WARNING):
        train(model, scaler, torch.optim.SGD(model.parameters(), lr=0.1))

    assert warnings(caplog) == []
