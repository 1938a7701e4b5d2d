"""Mistakes that new users make: each message says what was given, what is accepted, and what to do."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fxamp
from fxamp import torch_version
from fxamp.errors import VersionError

X = torch.ones(4, 8)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).pow(2).mean()


def compiled(**options: Any) -> Net:
    torch._dynamo.reset()
    model = Net()
    model.compile(backend="fxamp", options={"lowering": "eager", **options})
    return model


def scaled() -> tuple[Net, fxamp.GradScaler, torch.optim.Optimizer]:
    scaler = fxamp.GradScaler("cpu")
    model = compiled(scaler=scaler, lowering="aot_eager")
    return model, scaler, torch.optim.SGD(model.parameters(), lr=0.1)


def float16_parameters() -> None:
    model, scaler, _ = scaled()
    scaler.scale(model.half()(X.half())).backward()


def without_compiler() -> None:
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    with fresh_cache(), config.patch({"cpp.cxx": ("no-such-compiler",), "compile_threads": 1}):
        compiled(policy="cpu-bfloat16", lowering="inductor")(torch.ones(3, 8))


def from_environment() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXAMP_POLICY", "cpu-bf16")
        compiled()(X)


def old_torch() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_version, "_version_file", lambda: "__version__ = '2.10.1+cu128'")
        torch_version.require_torch()


#: A mistake, and parts of the message that it gets: what was given, what is accepted or what to do. Wrong options of
#: the backend and of scalers are in test_options and test_guarded_modes, those of commands in test_command_mistakes.
CALLS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "policy named in the environment": (from_environment, ["'cpu-bf16' (did you mean 'cpu-bfloat16'?)"]),
    "dump where nothing can be written": (
        lambda: compiled(dump="/proc/nothing")(X),
        ["'/proc/nothing', which cannot be written", "accepted: a folder"],
    ),
    "no C++ compiler": (without_compiler, ["no working C++ compiler", "install g++", "'aot_eager'"]),
    "old torch": (old_torch, ["torch 2.10.1+cu128 is installed", "pip install 'torch>=2.11,<2.16'"]),
    "scaler for an unknown device": (lambda: fxamp.GradScaler("cdua"), ["'cdua' is unknown (did you mean 'cuda'?)"]),
    "scale that is not positive": (lambda: fxamp.GradScaler("cpu", init_scale=-1), ["init_scale=-1", "greater than 0"]),
    "float16 parameters": (
        float16_parameters,
        ["a float16 parameter of shape (8, 8)", "no .half()"],
    ),
    "report of no model": (
        lambda: fxamp.report(3),
        ["report of 3, of type int", "accepted: what torch.comp"],
    ),
    "misspelt name": (lambda: fxamp.Gradscaler, ["'Gradscaler' (did you mean 'GradScaler'?)", "accepted: "]),
    "rewrite with wrong inputs": (
        lambda: fxamp.rewrite(Net(), (torch.ones(4, 7),), policy="cpu-float16"),
        ["Net could not be captured", "got [4, 7] X [8, 8]"],
    ),
}


@pytest.mark.parametrize("mistake", CALLS)
def test_an_error_names_the_argument_and_the_remedy(mistake: str) -> None:
    call, parts = CALLS[mistake]
    with pytest.raises(Exception) as caught:
        call()
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert len(message.splitlines()) <= 3


def test_float16_without_a_scaler_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        compiled(policy="cpu-float16")(X)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "fxamp.scaler.graphs.unscaled"]
    assert "cpu-float16 runs in float16" in message and "options={'scaler': scaler}" in message


@pytest.mark.parametrize("model", [Net(), copy.deepcopy(compiled())], ids=["never compiled", "a copy"])
def test_a_model_without_graphs_has_a_reason(model: Net) -> None:
    text = str(fxamp.report(model))
    assert text.startswith("0 graphs") and "A copy of a compiled model is not compiled" in text and "backend=" in text


def test_a_newer_torch_works_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch_version, "_version_file", lambda: "__version__ = '2.16.0'")
    torch_version.require_torch()
    assert "torch 2.16.0 is newer" in caplog.text and "torch>=2.11,<2.16" in caplog.text
    assert issubclass(VersionError, ImportError)


def test_the_versions_are_those_that_the_package_requires() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"torch>=2.11,<2.16"' in text and (torch_version.OLDEST, torch_version.UNTESTED) == ((2, 11), (2, 16))
    assert torch.__version__ in torch_version._version_file()


def test_a_framework_of_another_version_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fxamp.frameworks import setup

    monkeypatch.setattr(setup.metadata, "requires", lambda _: ['lightning==2.6.6; extra == "frameworks"'])
    for installed, messages in (("2.6.9", 0), ("3.0.1", 1)):
        monkeypatch.setattr(setup.metadata, "version", lambda _, version=installed: version)
        setup.warn_untested("lightning")
        assert len(caplog.records) == messages
    assert "lightning 3.0.1 is installed; fxamp is tested with 2.6.6" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
