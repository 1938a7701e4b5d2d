"""Mistakes on every command line are one line: what was given, the nearest match, what is accepted; status 2."""

import shlex
from pathlib import Path

import pytest
import torch
from support.checks.commands import Main, mistake
from support.machines.lacks import needs_triton
from support.programs.show_samples import gpt

from fxamp.graph_text.write import write_listing
from fxamp.tools.bench import command as bench
from fxamp.tools.demo import command as demo
from fxamp.tools.diff import command as diff
from fxamp.tools.policy import command as policy
from fxamp.tools.show import command as show

COMMANDS: dict[str, Main] = {
    "show": show.main,
    "diff": diff.main,
    "policy": policy.main,
    "bench": bench.main,
    "demo": demo.main,
}

FILES = {
    "later.toml": 'extends = ["cuda-float16.toml"]\n[match]\ntorch = ">=9"\n',
    "broken.toml": 'extends = ["cuda-float16.toml"]\ncasts = "fp32"\n',
    "table.toml": '[[rule]]\nid = "a"\ncast = "fp32"\nops = ["mm"]\n',
    "gpt.txt": write_listing(gpt()),
    "open.py": "import torch\nmodel = (\n",
}

BYTES = {"latin.txt": "Größe".encode("latin-1"), "bytes.bin": b"\x00\x01\x02"}

CASES = [
    ("show gpt.tx", "gpt.tx does not exist (did you mean 'gpt.txt'?); accepted: a graph as text"),
    ("show open.py", "it is not Python either: line 2: '(' was never closed"),
    ("show ''", "'' does not exist; accepted: a graph as text"),
    ("show gpt.txt/", "gpt.txt/ does not exist (did you mean 'gpt.txt'?)"),
    ("show .", ". is a folder; accepted: a graph as text"),
    ("show bytes.bin", "bytes.bin: it is neither text nor an archive of torch.export; accepted: "),
    ("show latin.txt", "latin.txt: it is not text in UTF-8; accepted: "),
    ("show gpt.txt --format jsn", "argument --format: 'jsn' is unknown (did you mean 'json'?); accepted: text, json"),
    ("show gpt.txt --polcy x", "unknown option '--polcy' (did you mean '--policy'?); accepted: --all"),
    ("show gpt.txt --width 0", "argument --width: '0' is not a whole number of 1 or more"),
    ("show gpt.txt --only castss", "--only 'castss': no rule here has this id (did you mean 'casts'?)"),
    ("show gpt.txt --only matrix-product", "did you mean 'matrix-products'?"),
    ("show gpt.txt --only typo", "--only 'typo': this rule decides no op here"),
    ("show gpt.txt --module h.0.atn", "--module 'h.0.atn' matches no module (did you mean 'h.0.attn'?)"),
    ("show gpt.txt --graph 1", "--graph 1: there is no such graph; accepted: 0"),
    ("show gpt.txt --why linaer", "--why 'linaer': no node has this name (did you mean 'linear'?)"),
    ("show gpt.txt --why linear --format html", "--why cannot be written as html; accepted: --format text"),
    ("show gpt.txt --check --format html", "--check cannot be written as html; accepted: --format text or json"),
    ("show gpt.txt --check --why linear", "--why and --check exclude each other"),
    ("show gpt.txt --output /no/folder/x", "--output '/no/folder/x': there is no folder /no/folder; accepted: a file"),
    ("diff cuda-flot16 cuda-float16", "no policy is named 'cuda-flot16'"),
    ("diff cuda-float16 tem.toml", "there is no policy file 'tem.toml'"),
    ("diff cuda-float16", "the following arguments are required: NEW; usage: fxamp-diff"),
    ("diff a b --grap x", "unknown option '--grap' (did you mean '--graph'?)"),
    (
        "diff a b --format txt",
        "argument --format: 'txt' is unknown (did you mean 'text'?); accepted: text, json, markdown",
    ),
    ("diff cuda-float16 cpu-float16 --device cuda", "policy 'cpu-float16' is for device 'cpu'"),
    ("diff cuda-float16 cuda-float16 --device cude", "--device 'cude' is unknown (did you mean 'cuda'?)"),
    ("diff cuda-float16 cuda-float16 --torch new", "'new' is not a torch version"),
    ("diff later.toml cuda-float16", "policy 'later' needs torch >=9, but torch "),
    ("diff later.toml cuda-float16 --torch 2.13", "policy 'later' does not match: it needs torch >=9"),
    ("diff broken.toml cuda-float16", "broken.toml:2: unknown key 'casts' in a policy file"),
    ("diff table.toml cuda-float16 --graph g.py", "table.toml is an op table, which does not say device or"),
    ("diff cuda-float16 cpu-float16 --output no/where.txt", "--output 'no/where.txt': there is no folder"),
    ("diff cpu-float16 cpu-bfloat16 --run ''", "'' does not exist; accepted: a Python file"),
    ("diff --git x.toml y", "--git was called with 2 arguments; accepted: git's PATH OLD-FILE"),
    ("policy chek", "unknown subcommand 'chek' (did you mean 'check'?); accepted: list, check, show, explain"),
    ("policy show cpu-float61", "no policy is named 'cpu-float61'"),
    ("policy show cpu-float16 --device cuda", "is for device 'cpu', but the program runs on 'cuda'"),
    ("policy show cpu-float16 --torch new", "'new' is not a torch version"),
    ("policy show cpu-float16 --devise cpu", "unknown option '--devise' (did you mean '--device'?)"),
    ("policy check nowhere.toml", "there is no policy file 'nowhere.toml'"),
    ("policy list --device cude", "'cude' is unknown (did you mean 'cuda'?)"),
    ("policy explain mm", "the following arguments are required: --policy"),
    ("policy explain 'm m' --policy cpu-float16", "'m m' is not an op name"),
    ("policy explain mm --policy cpu-float16 --region back", "'back' is unknown (did you mean 'backward'?)"),
    ("policy explain mm --policy cpu-float16 --arg dim", "--arg 'dim' is not an argument"),
    ("policy explain mm --policy cpu-float16 --arg a.sze=1", "unknown 'sze'; accepted: dtype, rank, size"),
    ("policy explain mm --policy cpu-float16 --arg a.size=x", "'x' is not a size; accepted: whole numbers"),
    ("policy explain mm --policy cpu-float16 --arg a.dtype=float31", "(did you mean 'float32'?)"),
    ("policy calibrate nowhere.py", "nowhere.py does not exist"),
    ("policy calibrate gpt.txt", "whose name ends in .py"),
    ("policy calibrate m.py --loss-scale 3", "'3' is not a power of two"),
    ("policy calibrate m.py --underflow 2", "'2' is not a share"),
    ("policy calibrate m.py --output patch", "accepted: 'patch.toml'"),
    ("policy calibrate m.py --polcy x", "did you mean '--policy'?"),
    ("policy bisect m.py --tolerance 0", "'0' is not a relative error"),
    ("policy bisect m.py --tolerance 1 --measure gradients", "'gradients' is unknown (did you mean 'gradient'?)"),
    ("policy bisect m.py --tolerance 1 --by layers", "accepted: modules, rules"),
    ("policy bisect m.py --tolerance 1 --region backward", "accepted: forward, kept"),
    (
        "policy bisect m.py --tolerance 1 --region kept --measure output",
        "do not depend on how values are kept; accepted: gradient",
    ),
    ("bench polices", "did you mean 'policies'"),
    ("bench all --json", "unknown subcommand 'all'; accepted: check, train, host, step, cost, policies, kernels"),
    ("bench train --model gpt2", "'gpt2-124m'"),
    ("bench train --contenders fxamp,compile-autocst", "'compile-autocast'"),
    ("bench train --set widht=3", "'width'"),
    ("bench train --set width", "NAME=N"),
    ("bench train --contenders fxamp --baseline eager-float32", "not one of the contenders"),
    ("bench train --steps 0", "'0'"),
    ("bench train --dtype float61", "'float16'"),
    ("bench train --optimizer NAdem", "'NAdam'"),
    ("bench train --clip -1", "'-1'"),
    ("bench train --contenders fxamp-skip-device", "float16"),
    ("bench step --contenders fussed", "(did you mean 'fused'?)"),
    ("bench step --optimizer AdamsW", "(did you mean 'AdamW'?)"),
    ("bench step --parameters 0", "'0' is not a whole number of 1 or more"),
    ("bench step --lowering eager", "'eager'"),
    ("bench cost --every --model mlp", "--every counts all models"),
    ("bench cost --policy cuda-flot16", "cuda-float16"),
    ("bench cost nowhere.py", "nowhere.py does not exist"),
    ("bench cost nowhere.py --layers 2", "--layers are for the models"),
    ("bench cost --policy ''", "no policy is named ''"),
    ("bench train --chart .", "--chart '.' is a folder; accepted: a file"),
    ("bench cost --optimizer AdamX", "AdamW"),
    ("bench policies --policy cuda-bfloat16-laen", "did you mean 'cuda-bfloat16-lean'"),
    ("bench check --device cpu --only unscael --only zzz", "--only 'unscael' or 'zzz': no check's name contains it"),
    ("bench kernels --devic x", "'--devic'"),
    ("bench kernels --json --markdown", "not allowed with"),
    ("demo --polcy x", "'--policy'"),
    ("demo --policy cpu-bfloat61", "'cpu-bfloat16'"),
    ("demo --policy cuda-float16", "cuda"),
    ("demo --lowering aot-eager", "'aot_eager'"),
    ("demo --device cdua", "'cuda'"),
    ("demo --steps 0", "'0'"),
    ("demo --picture /nowhere/at/all.svg", "/nowhere/at"),
]

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
DEVICES = ("bench check", "bench train", "bench step", "demo")
ELSEWHERE = [
    pytest.param("bench kernels --arch sm90", "did you mean 'sm_90'", marks=needs_triton),
    *(pytest.param(f"{command} --device cuda", "no CUDA device", marks=WITHOUT_GPU) for command in DEVICES),
]


@pytest.mark.parametrize(("line", "message"), [*CASES, *ELSEWHERE])
def test_a_mistake_is_one_line_that_names_it(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    for name, content in BYTES.items():
        Path(name).write_bytes(content)
    command, *arguments = shlex.split(line)
    error = mistake(COMMANDS[command], arguments, capsys)
    assert error.startswith(f"fxamp-{command}") and message in error


EXITS = """
import sys, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 4)
    def forward(self, x):
        {}
model, inputs = Net(), (torch.randn(2, 4),)
"""


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("diff cpu-bfloat16 cpu-float16 --run exits.py", "sys.exit(0)"),
        ("diff cpu-bfloat16 cpu-float16 --run exits.py", "exit(0)"),
        ("policy calibrate exits.py", "sys.exit(0)"),
        ("policy bisect exits.py --tolerance 0.1", "sys.exit(0)"),
        ("show exits.py", "sys.exit(0)"),
    ],
)
def test_a_model_that_exits_is_a_mistake(
    line: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("exits.py").write_text(EXITS.format(call))
    command, *arguments = shlex.split(line)
    assert COMMANDS[command](arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].endswith(
        "exits.py:8: this line ends the program by exit(0); accepted: code that returns"
    )
