"""A call with an argument of an unknown name is refused at once, with the nearest name and where options go."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import fxamp
from fxamp.errors import ArgumentError, OptionError
from fxamp.frameworks.accelerate import prepare
from fxamp.frameworks.lightning import FxampPrecision
from fxamp.frameworks.transformers import FxampCallback

ADAPTERS: dict[str, Callable[..., Any]] = {
    "FxampCallback": FxampCallback,
    "FxampPrecision": FxampPrecision,
    "prepare": lambda **arguments: prepare(Accelerator(), torch.nn.Linear(2, 2), **arguments),
}

#: Methods that hand what they do not know to another callable, as torch's contract says.
PASSING_ON = {"GradScaler.from_policy", "GradScaler.step", "Rule"}


def public_callables() -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Yield each with its name, and whether Python alone refuses: the methods of objects."""
    for name in fxamp.__all__:
        value = getattr(fxamp, name)
        if isinstance(value, type) and issubclass(value, Exception):
            continue
        yield name, value, False
        members = vars(value).items() if isinstance(value, type) else ()
        for member, function in members:
            if not member.startswith("_") and callable(getattr(value, member)):
                made_by_class = isinstance(function, (staticmethod, classmethod))
                yield f"{name}.{member}", getattr(value, member), not made_by_class


CALLABLES = {name: rest for name, *rest in public_callables() if name not in PASSING_ON}


@pytest.mark.parametrize("name", CALLABLES)
def test_a_public_callable_refuses_an_unknown_name(name: str) -> None:
    called, by_python = CALLABLES[name]
    parameters = [part for part in inspect.signature(called).parameters if part != "self"]
    known = parameters[-1] if parameters else "nothing"
    with pytest.raises(TypeError, match=f"{known}s") as raised:
        called(**{f"{known}s": None})
    if not by_python:
        assert isinstance(raised.value, ArgumentError)
        assert str(raised.value) == (
            f"{name} has no argument '{known}s' (did you mean '{known}'?); accepted: {', '.join(parameters)}"
        )


def test_what_the_test_covers() -> None:
    names = {"GradScaler", "Policy", "Policy.load", "Policy.loads", "compile_optimizer", "report", "rewrite"}
    names |= {"CastRule", "ChunkRule", "DropRule", "KeepRule"}
    assert {name for name, (_, by_python) in CALLABLES.items() if not by_python} == names
    assert {"GradScaler.update", "GradScaler.clip_grad_norm_", "Policy.resolve"} <= CALLABLES.keys()


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("option", ["lowering", "inductor", "dump"])
def test_an_adapter_explains_where_options_go(adapter: str, option: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        ADAPTERS[adapter](policy="cpu-bfloat16", **{option: "eager"})
    assert str(raised.value) == f"{adapter} has no argument {option!r}; accepted: options={{{option!r}: ...}}"


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        ({"polcy": "cpu-bfloat16"}, "(did you mean 'policy'?)"),
        ({"lowring": "eager"}, "(did you mean 'lowering'?); accepted: policy, scaler, options"),
        ({"dynamics": True}, "(did you mean 'dynamic'?)"),
        ({"backend": "eager"}, "; in options: lowering, inductor, "),
        ({"options": {"lowring": "eager"}}, "(did you mean 'lowering'?)"),
        ({"options": {"lowering": "eagre"}}, "(did you mean 'eager'?)"),
        ({"policy": "cpu-float16", "scaler": {"skp": "device"}}, "GradScaler has no argument 'skp' (did you mean"),
    ],
)  # fmt: skip
def test_an_adapter_refuses_a_misspelled_name(adapter: str, arguments: dict[str, Any], nearest: str) -> None:
    with pytest.raises(OptionError) as raised:
        ADAPTERS[adapter](**arguments)
    assert nearest in str(raised.value)


def test_what_an_adapter_takes_is_what_torch_compile_takes() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    options = {"lowering": "eager"}
    callback = FxampCallback("cpu-bfloat16", options=options, dynamic=True, fullgraph=True, disable=False)
    module = Net()
    callback._compile(module)
    for size in (4, 5):
        module(torch.ones(size, size))
    assert len(fxamp.report(module).graphs) == 1
    assert FxampPrecision("cpu-bfloat16", mode="max-autotune")._setup.options == {"mode": "max-autotune"}
    with pytest.raises(OptionError, match="contradict each other"):
        FxampPrecision("cpu-bfloat16", mode="max-autotune", options={"mode": "reduce-overhead"})
