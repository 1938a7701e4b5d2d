"""Mistakes that new users make: each message says what was given, what is accepted, and what to do."""

import copy
import importlib
import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fxamp
from fxamp import torch_version
from fxamp.errors import VersionError
from fxamp.reports.warnings import warn_once

X = torch.ones(4, 8)

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.body(x).pow(2).mean()
"""
FILES = {
    "net.py": NET + "\nmodel, inputs = Net(), (torch.ones(4, 8),)\n",
    "empty.py": "import torch\n",
    "no_inputs.py": NET + "\nmodel = Net()\n",
    "wrong_inputs.py": NET + "\nmodel, inputs = Net(), (torch.ones(4, 7),)\n",
    "class.py": NET + "\nmodel, inputs = Net, (torch.ones(4, 8),)\n",
    "broken.py": "import torch\nmodel = (\n",
    "missing.py": "import no_such_package\nmodel, inputs = 1, 2\n",
}


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
#: the backend and of scalers are in test_options and test_guarded_modes.
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

#: A command with a mistake, and parts of its message.
COMMANDS: dict[str, list[str]] = {
    "fxamp-show nets.py": ["nets.py does not exist (did you mean 'net.py'?)", "accepted: a graph as text"],
    "fxamp-show empty.py --policy cpu-float16": ["defines no model and no inputs", "accepted: model (an nn.Module"],
    "fxamp-show no_inputs.py": ["defines no inputs; it defines Net, model, torch", "accepted: "],
    "fxamp-show wrong_inputs.py --policy cpu-float16": ["calling model on inputs failed", "[4, 7] X [8, 8]"],
    "fxamp-show class.py": ["model is the class Net; accepted: an instance, Net(...)"],
    "fxamp-show broken.py": ["nor is it Python: line 2: '(' was never closed"],
    "fxamp-show missing.py": ["missing.py", "No module named 'no_such_package'"],
    "fxamp-show net.py --polcy x": ["unknown option '--polcy' (did you mean '--policy'?)"],
    "fxamp-show net.py --policy cuda-float16 --device tpu": ["--device 'tpu' is unknown", "accepted: cuda, cpu"],
    "fxamp-show net.py --policy cpu-float16 --why linaer": ["'linaer'", "did you mean 'linear'?"],
    "fxamp-show net.py --output no/such/file": ["there is no folder", "accepted: a file in an existing folder"],
    "fxamp-show .": [". is a folder; accepted:"],
    "fxamp-diff cpu-float16": ["required: NEW; usage: fxamp-diff"],
    "fxamp-diff cpu-float16 cpu-flot16": ["did you mean 'cpu-float16'?"],
    "fxamp-diff cpu-float16 cpu-bfloat16 --run nets.py": [
        "nets.py does not exist (did you mean 'net.py'?)",
        "a Python file",
    ],
    "fxamp-policy chekc": ["unknown subcommand 'chekc' (did you mean 'check'?)"],
    "fxamp-policy explain linear --policy nope": ["no policy is named 'nope'; accepted: "],
    "fxamp-policy calibrate no_inputs.py": ["it defines no batches", "accepted: model (an nn.Module"],
    "fxamp-policy calibrate net.py --output patch.txt": ["ends in .toml; accepted: 'patch.txt.toml'"],
    "fxamp-policy bisect net.py": ["required: --tolerance"],
    "fxamp-policy bisect net.py --tolerance small": ["'small' is not a relative error", "such as 1e-3"],
    "fxamp-policy bisect net.py --tolerance 1e-2 --policy cuda-float16": ["is for cuda, but the model is on cpu"],
    "fxamp-bench trian": ["did you mean 'train'?"],
    "fxamp-bench train --model gpt3": ["'gpt3' is unknown", "accepted: gpt2-124m"],
    "fxamp-bench cost nets.py": ["nets.py: there is no such file"],
    "fxamp-demo --step 3": ["unknown option '--step' (did you mean '--steps'?)"],
    "fxamp-demo --ddp": ["torchrun --nproc-per-node 2"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mistake", CALLS)
def test_a_call_says_what_was_given_and_what_to_do(mistake: str) -> None:
    call, parts = CALLS[mistake]
    with pytest.raises(Exception) as caught:
        call()
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert len(message.splitlines()) <= 3


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_was_given_and_what_to_do(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = shlex.split(command)
    module = importlib.import_module(f"fxamp.tools.{name.removeprefix('fxamp-')}.command")
    try:
        status = module.main(arguments)
    except SystemExit as left:
        status = left.code
    out, err = capsys.readouterr()
    message = err.splitlines()[-1]
    assert status == 2 and not out and all(part in message for part in COMMANDS[command]), (out, err)
    assert "Traceback" not in err


def test_float16_without_a_scaler_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    for _ in range(2):
        compiled(policy="cpu-float16")(X)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "fxamp.scaler.graphs.unscaled"]
    assert "cpu-float16 runs in float16" in message and "options={'scaler': scaler}" in message


@pytest.mark.parametrize("model", [Net(), copy.deepcopy(compiled())], ids=["never compiled", "a copy"])
def test_a_model_without_graphs_says_why(model: Net) -> None:
    text = str(fxamp.report(model))
    assert text.startswith("0 graphs") and "A copy of a compiled model is not compiled" in text and "backend=" in text


def test_a_newer_torch_is_said_and_works(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch_version, "_version_file", lambda: "__version__ = '2.16.0'")
    torch_version.require_torch()
    assert "torch 2.16.0 is newer" in caplog.text and "torch>=2.11,<2.16" in caplog.text
    assert issubclass(VersionError, ImportError)


def test_the_versions_are_those_that_the_package_requires() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"torch>=2.11,<2.16"' in text and (torch_version.OLDEST, torch_version.UNTESTED) == ((2, 11), (2, 16))
    assert torch.__version__ in torch_version._version_file()


def test_a_framework_of_another_version_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fxamp.frameworks import setup

    warn_once.cache_clear()
    monkeypatch.setattr(setup.metadata, "requires", lambda _: ['lightning==2.6.6; extra == "frameworks"'])
    for installed, messages in (("2.6.9", 0), ("3.0.1", 1)):
        monkeypatch.setattr(setup.metadata, "version", lambda _, version=installed: version)
        setup.warn_untested("lightning")
        assert len(caplog.records) == messages
    assert "lightning 3.0.1 is installed; fxamp is tested with 2.6.6" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
