"""A Python file with a model: run to get it, never run as a model; its mistakes are one line with their place."""

import re
from pathlib import Path

import pytest
from support.programs.show_dumps import rows

from fxamp.errors import ListingError
from fxamp.tools.inputs.load import Request, load
from fxamp.tools.inputs.model_file import arguments

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(16, 32)
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x, scale=1.0):
        return self.head(self.body(x).relu()).softmax(-1) * scale

"""


def _file(tmp_path: Path, text: str) -> str:
    file = tmp_path / "model.py"
    file.write_text(text)
    return str(file)


def _load(tmp_path: Path, text: str) -> list[tuple[str, int]]:
    document = load(_file(tmp_path, text), Request(policy="cpu-bfloat16"))
    return [(listing.ended, sum(entry.is_cast for _, entry in listing.walk())) for listing in document.graphs]


FORMS = {
    "values": "model = Net()\ninputs = (torch.randn(2, 16),)\n",
    "one tensor": "model = Net()\ninputs = torch.randn(2, 16)\n",
    "keywords": "model = Net()\ninputs = {'x': torch.randn(2, 16), 'scale': 2.0}\n",
    "both": "model = Net()\ninputs = ((torch.randn(2, 16),), {'scale': 2.0})\n",
    "both, in a list": "model = Net()\ninputs = [[torch.randn(2, 16)], {}]\n",
    "both, for a function": "net = Net()\ndef model(x, *, s):\n    return net(x, s)\n"
    "inputs = [torch.randn(2, 16)], {'s': 2.0}\n",
    "functions": "def model():\n    return Net()\n\ndef inputs():\n    return [torch.randn(2, 16)]\n",
    "imported": "from torch import *\nvars()['model'], vars()['inputs'] = Net(), (torch.randn(2, 16),)\n",
    "a function as model": "net = Net()\n\ndef model(x):\n    return net(x)\n\ninputs = (torch.randn(2, 16),)\n",
    "on meta": "with torch.device('meta'):\n    model = Net()\ninputs = (torch.randn(2, 16),)\n",
    "all on meta": "with torch.device('meta'):\n    model, inputs = Net(), (torch.randn(2, 16),)\n",
    "under if": "if True:\n    model, inputs = Net(), (torch.randn(2, 16),)\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_the_ways_to_name_a_model(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _load(tmp_path, NET + FORMS[form]) == [("", 6)]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"fxamp-show: running .*model\.py to get its model and inputs\n", printed.err)


@pytest.mark.parametrize(
    ("signature", "args", "kwargs"),
    [
        ("x, scale=1.0", (1,), {"scale": 2.0}),
        ("x, *, scale", (1,), {"scale": 2.0}),
        ("*args, **kwargs", (1,), {"scale": 2.0}),
        ("states, options", ((1,), {"scale": 2.0}), {}),
        ("states, options=None", ((1,), {"scale": 2.0}), {}),
    ],
)
def test_a_tuple_and_a_dict_are_what_the_model_can_be_called_with(
    signature: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    model = eval(f"lambda {signature}: None")
    assert arguments(model, ((1,), {"scale": 2.0}), "inputs") == (args, kwargs)


@pytest.mark.parametrize(
    ("first", "encoding"), [("", "utf-8-sig"), ("# -*- coding: latin-1 -*-", "latin-1")], ids=["mark", "declared"]
)
def test_a_file_is_read_in_the_encoding_that_python_would_use(tmp_path: Path, first: str, encoding: str) -> None:
    file = tmp_path / "model.py"
    file.write_bytes((first + NET + "name = 'é'\n" + FORMS["values"] + "assert len(name) == 1\n").encode(encoding))
    assert load(str(file), Request(policy="cpu-bfloat16")).graphs


def test_a_module_of_torch_itself(tmp_path: Path) -> None:
    text = (
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())\ninputs = torch.ones(2, 4)\n"
    )
    (listing,) = load(_file(tmp_path, text), Request()).graphs
    assert {entry.module for entry in listing.entries if entry.target == "aten::linear.default"} == {"0"}


def test_modules_and_lines_are_those_of_the_file(tmp_path: Path) -> None:
    file = _file(tmp_path, NET + FORMS["values"])
    (listing,) = load(file, Request(policy="cuda-float16")).graphs
    (linear, _) = [entry for entry in listing.entries if entry.target == "aten::linear.default"]
    assert (linear.module, linear.module_class, linear.dtype) == ("body", "Linear", "f16")
    assert linear.source is not None
    assert (linear.source.file, linear.source.line) == (file, 11)
    assert {value.device for entry in listing.entries for value in entry.values} == {"cuda"}


def test_the_policy_taken_and_why(tmp_path: Path) -> None:
    file = _file(tmp_path, NET + FORMS["values"])
    chosen = {
        (listing.policy, listing.chosen)
        for request in (Request(), Request(policy="auto"), Request(device="cuda:1"), Request(policy="cuda-float16"))
        for listing in load(file, request).graphs
    }
    assert chosen == {
        ("cpu-bfloat16", "bfloat16 is the default on cpu; --policy names another"),
        ("cuda-bfloat16", "bfloat16 is the default on cuda; --policy names another"),
        ("cuda-float16", "named by --policy"),
    }


def test_nothing_is_computed_on_real_tensors(tmp_path: Path) -> None:
    text = (
        "import torch\n\nseen = []\n\ndef model(x):\n    y = x @ x\n    torch._dynamo.graph_break()\n"
        "    look(y)\n    return y @ x\n\n@torch.compiler.disable\ndef look(y):\n"
        "    assert type(y).__name__ == 'FakeTensor', type(y)\n\ninputs = (torch.ones(4, 4),)\n"
    )
    assert len(_load(tmp_path, text)) == 2
    side = 2**20
    big = NET.replace("16, 32", f"16, {side}").replace("32, 4", f"{side}, {side}") + FORMS["on meta"]
    assert _load(tmp_path, big) == [("", 6)]


def test_graph_breaks_give_a_graph_each(tmp_path: Path) -> None:
    text = (
        "import torch\n\ndef model(x):\n    y = x @ x\n    torch._dynamo.graph_break()\n    return (y @ x).sum()\n\n"
        "inputs = (torch.randn(4, 4, requires_grad=True),)\n"
    )
    (first, second) = load(_file(tmp_path, text), Request(policy="cpu-bfloat16")).graphs
    assert "graph break" in first.ended
    assert "model.py:5: " in first.ended
    assert second.ended == ""
    assert "aten::matmul.default" in {entry.target for entry in second.entries}
    assert all(entry.needs_grad for entry in (*first.entries, *second.entries) if entry.kind == "placeholder")


def test_code_that_needs_values_runs_the_model_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "import torch\n\ndef model(x):\n    y = x @ x\n    if y.sum().item() > 0:\n        y = y @ x\n    return y\n\n"
        "inputs = (torch.ones(4, 4),)\n"
    )
    assert len(_load(tmp_path, text)) == 2
    assert "running the model on its real inputs, because FakeTensors are not enough: " in capsys.readouterr().err


def test_a_model_without_a_graph(tmp_path: Path) -> None:
    text = "import torch\n\ndef model(x):\n    return x\n\ninputs = (torch.ones(4, 4),)\n"
    with pytest.raises(ListingError, match=r"model\.py: Dynamo makes no graph of model\(inputs\)"):
        _load(tmp_path, text)


def test_the_main_part_does_not_run_and_prints_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = NET + "print('loading')\n" + FORMS["values"] + "if __name__ == '__main__':\n    raise SystemExit(5)\n"
    assert _load(tmp_path, text) == [("", 6)]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "loading\n" in printed.err


MISTAKES = {
    "modl = 3\ninputs = ()\n": r"model\.py: it defines no model \(did you mean 'modl'\?\); it defines inputs, modl; ",
    NET: r"model\.py: it defines no model and no inputs; it defines Net, torch; accepted: model \(an nn.Module",
    NET + "model = Net()\n": r"it defines no inputs",
    NET + "model = Net\ninputs = ()\n": r"model is the class Net; accepted: an instance, Net\(\.\.\.\)",
    "model = 3\ninputs = ()\n": r"model is of type int; accepted: an nn.Module or a function",
    NET + "model = Net()\ninputs = 3\n": r"inputs is of type int; accepted: a tuple of the model's arguments",
    "model = 1\n\ninputs = 1 / 0\n": r"model\.py:3: ZeroDivisionError: division by zero",
    "import sys\nmodel = 1\ninputs = sys.exit(3)\n": r"model\.py:3: the file ended itself by exit\(3\)",
    "model = 1\n\ndef inputs():\n    raise ValueError('no\\ndata')\n": r"model\.py:4: ValueError: no$",
    "import nowhere_at_all\nmodel = inputs = 1\n": r"model\.py:1: ModuleNotFoundError: .*'nowhere_at_all'",
    "exec('model = 1')\ninputs = 1\n": r"it defines no model; it defines inputs; ",
    NET + "model = Net()\ninputs = torch.ones(2, 3)\n": r"model\.py:\d+: calling model on inputs failed: .*3",
    NET + "model = Net()\ninputs = ()\n": r"calling model on inputs failed: .*missing 1 required .*'x'",
    NET + "model = Net()\ninputs = {'z': 1}\n": r"calling model on inputs failed: .*unexpected keyword argument 'z'",
}


@pytest.mark.parametrize("text", MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ListingError, match=MISTAKES[text]) as caught:
        _load(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_argparse_in_the_file_does_not_end_the_tool(tmp_path: Path) -> None:
    text = "import argparse\nmodel = 1\ninputs = argparse.ArgumentParser().parse_args(['--x'])\n"
    with pytest.raises(ListingError, match=r"model\.py:3: the file ended itself by exit\(2\)"):
        _load(tmp_path, text)


def test_a_dump_is_no_model_file(tmp_path: Path) -> None:
    text = 'class GraphModule(torch.nn.Module):\n    def forward(self, x: "f32[2]"):\n        return (x,)\n'
    assert len(load(_file(tmp_path, text), Request()).graphs) == 1


@pytest.mark.exhaustive
def test_gpt2_of_transformers(tmp_path: Path) -> None:
    text = (
        "import torch\nfrom transformers import GPT2Config, GPT2LMHeadModel\n"
        "config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, "
        "eos_token_id=0, loss_type='ForCausalLM')\n"
        "with torch.device('meta'):\n    model = GPT2LMHeadModel(config)\n"
        "inputs = {'input_ids': torch.randint(32, (2, 8)), 'labels': torch.randint(32, (2, 8))}\n"
    )
    document = load(_file(tmp_path, text), Request(policy="cuda-float16"))
    assert len(document.graphs) >= 1
    targets = {row[1] for listing in document.graphs for row in rows(listing)}
    assert {"aten::scaled_dot_product_attention.default", "aten::nll_loss.default"} <= targets
    assert "h.0.attn" in {entry.module.removeprefix("transformer.") for entry in document.graphs[0].entries}
