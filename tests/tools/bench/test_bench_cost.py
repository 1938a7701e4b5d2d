"""fxamp-bench cost: counts of small programs worked out by hand, and what it prints and refuses."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checks.cost_counting import Counting
from support.checks.generated_bytes import generated_bytes
from support.machines.inductor_code import generated, printed_modules
from support.machines.lacks import needs_compiler
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxamp.errors import OptionError
from fxamp.tools.bench import command as bench
from fxamp.tools.bench.cost import command, hooks, simulated_gpu
from fxamp.tools.bench.cost.count import Access, Buffer, Count, Kernel, Peak
from fxamp.tools.bench.cost.eager import EagerOps
from fxamp.tools.bench.cost.program import fake_workload
from fxamp.tools.bench.cost.rates import Rates
from fxamp.tools.bench.cost.row import extrapolated, row
from fxamp.tools.bench.cost.workload import Way, Workload

PROGRAM = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 32)
        self.table = nn.Parameter(torch.zeros(5000, 128))

    def forward(self, index):
        hidden = self.table[index]
        logits = self.linear(hidden)
        return logits.float().logsumexp(-1).sum(), logits

model, inputs = Net(), (torch.zeros(64, dtype=torch.int64),)
"""
#: What comes before a block of attention in BERT.
BLOCK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(768)
        self.products = nn.ModuleList(nn.Linear(768, 768) for _ in range(4))

    def forward(self, x):
        x = self.norm(self.products[0](x) + x)
        q, k, v = (product(x) for product in self.products[1:])
        return (q * k * v + x).sum()

model, inputs = Net(), (torch.zeros(16, 512, 768),)
"""
TWO_GRAPHS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        first = torch.mm(x * self.scale, x).sigmoid().sum()
        torch._dynamo.graph_break()
        return first * torch.mm(x * self.scale, x).sigmoid().sum()

model, inputs = Net(), (torch.zeros(1024, 1024),)
"""
CROSS_ENTROPY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.head = nn.Linear(256, 4096)

    def forward(self, x, target):
        return nn.functional.cross_entropy(self.head(nn.functional.gelu(self.first(x))), target)

model, inputs = Net(), (torch.zeros(512, 64), torch.zeros(512, dtype=torch.long))
"""
LAYERS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(256, 256) for _ in range(5))

    def forward(self, x):
        for product in self.products:
            x = nn.functional.gelu(product(x))
        return x.sum()

model, inputs = Net(), (torch.zeros(4096, 256),)
"""
#: Prints how many GPUs torch sees in a process that counts, whether it would use one, and the one that Inductor knows.
SEEN = """
import json, sys
from fxamp.tools.bench.cost.hooks import prepare_torch
prepare_torch()
import torch
from torch._dynamo.device_interface import get_interface_for_device
from fxamp.tools.bench.cost.simulated_gpu import compiling_for_gpu
visible = torch._C._cuda_getDeviceCount() if torch.version.cuda else 0
with compiling_for_gpu():
    name = get_interface_for_device("cuda").get_device_properties(0).name
    json.dump([visible, torch.cuda.is_available(), name], sys.stdout)
"""
#: Elements of the program's tensors: the gathered rows, the weight, the logits, the table.
ROWS, WEIGHT, LOGITS, TABLE = 64 * 128, 32 * 128, 64 * 32, 5000 * 128
PARAMETERS = WEIGHT + 32 + TABLE


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, counting: Counting) -> dict[str, Count]:
    """The program under torch and under fxamp, float16 with a scaler."""
    file = tmp_path_factory.mktemp("cost") / "net.py"
    file.write_text(PROGRAM)
    workload = Workload(str(file))
    ways = {
        "torch": (workload, Way()),
        "fxamp": (workload, Way("cuda-float16")),
        "clipped": (replace(workload, clip=True), Way()),
    }
    return {name: counting(*request) for name, request in ways.items()}


def kernels(count: Count, stage: str, kind: str) -> list[Kernel]:
    return [kernel for kernel in count.kernels if (kernel.stage, kernel.kind) == (stage, kind)]


def moved(accesses: Iterable[Access]) -> list[tuple[int, str]]:
    return sorted((access.bytes, access.dtype) for access in accesses)


@pytest.mark.parametrize("way", ["torch", "fxamp"])
def test_forward_of_a_small_program_is_what_pen_and_paper_say(counted: dict[str, Count], way: str) -> None:
    """The gather reads 64 rows of 5000 and casts them; bias, rows and weight go into one product."""
    count = counted[way]
    gathers = [k for k in kernels(count, "forward", "triton") if (ROWS * 4, "float32") in moved(k.reads)]
    assert [(moved(k.reads), moved(k.writes)) for k in gathers] == [
        ([(64 * 8, "int64"), (ROWS * 4, "float32")], [(ROWS * 2, "float16")])
    ]
    (product,) = kernels(count, "forward", "matmul")
    read = {access.bytes for access in product.reads}
    assert {ROWS * 2, WEIGHT * 2} <= read and moved(product.writes) == [(LOGITS * 2, "float16")]
    assert count.flops == {"float16": 2 * 64 * 128 * 32 * 3}  # forward, the gradients of rows and weight
    assert count.graphs == 1


@pytest.mark.parametrize("way", ["torch", "fxamp"])
def test_a_saved_tensor_has_its_name_and_source(counted: dict[str, Count], way: str) -> None:
    values = counted[way].kept
    assert (ROWS * 2, "float16", (64, 128)) in [(value.bytes, value.dtype, value.shape) for value in values]
    assert all(value.source.rpartition(":")[0].endswith("net.py") for value in values if value.bytes > 1000)
    assert any(value.module == "linear" for value in values)


def test_step_is_counted_by_hand(counted: dict[str, Count]) -> None:
    """torch: check 2, fused AdamW 7 and the unscaled gradients 1; clipped: unscale 2, norm 1, multiply 2, AdamW 7."""
    per = {way: count.bytes("step") / (4 * PARAMETERS) for way, count in counted.items()}
    assert per == {"torch": 10, "fxamp": 7, "clipped": 12}


def test_gradients_of_unused_results_and_the_check_are_counted(counted: dict[str, Count]) -> None:
    (zeros,) = kernels(counted["torch"], "backward", "zeros")
    assert moved(zeros.writes) == [(LOGITS * 2, "float16")]
    assert not kernels(counted["torch"], "backward", "fxamp")
    (check,) = kernels(counted["fxamp"], "backward", "fxamp")
    assert check.bytes >= PARAMETERS * (2 + 4)
    assert all(
        "net.py" in source for kernel in kernels(counted["fxamp"], "forward", "triton") for source in kernel.sources
    )


@pytest.mark.exhaustive
def test_a_backward_with_nothing_to_unscale_is_lighter_too(tmp_path: Path, counting: Counting) -> None:
    """The gradient of a norm that three products and a sum read: four values, which few kernels need to read."""
    file = tmp_path / "block.py"
    file.write_text(BLOCK)
    workload = Workload(str(file), dtype="bfloat16", optimizer="none")
    theirs, ours = (counting(workload, Way(policy)) for policy in ("", "auto"))
    backward, forward = (
        [sum(kernel.bytes for kernel in count.kernels if kernel.stage == stage) for count in (theirs, ours)]
        for stage in ("backward", "forward")
    )
    assert forward[0] == forward[1] and backward[1] < backward[0]


def test_peak_is_at_the_end_of_the_backward(counted: dict[str, Count]) -> None:
    """torch has all gradients, and in 16 bits that of the rows, which the table's is made of. fxamp has what its check
    reads as well: the table's gradient in float32, the others in 16 bits, the inverse of the scale; and three flags."""
    assert counted["torch"].peak.bytes == 4 * PARAMETERS + 2 * ROWS
    assert counted["fxamp"].peak.bytes == 4 * PARAMETERS + 4 * TABLE + 2 * (WEIGHT + 32) + 4 + 3 * 4


def test_what_is_in_use_at_the_peak_is_known_by_hand(counted: dict[str, Count]) -> None:
    """All gradients, and of the rows that in 16 bits, from which the kernel makes the table's gradient."""
    peak = counted["torch"].peak
    shapes = [tuple(size for size in b.shape if size > 1) for b in peak.buffers]  # torch 2.12 sums with an axis of 1
    assert [(b.bytes, b.dtype, shape, b.kind, b.stage) for b, shape in zip(peak.buffers, shapes, strict=True)] == [
        (4 * TABLE, "float32", (5000, 128), "gradient", "backward"),
        (2 * ROWS, "float16", (64, 128), "temporary", "backward"),
        (4 * WEIGHT, "float32", (32, 128), "gradient", "backward"),
        (4 * 32, "float32", (32,), "gradient", "backward"),
    ]
    assert (peak.buffers[1].op, peak.buffers[1].module, peak.buffers[2].module) == ("mm", "linear", "linear")
    assert peak.stage == "backward" and 1 < peak.kernel <= peak.kernels and "index_put" in peak.ops
    lines = {buffer.source.rpartition(":")[2] for buffer in (*peak.buffers, peak)}
    assert lines == {"12", "13"} and peak.source.endswith("net.py:12")


@pytest.mark.parametrize("way", ["torch", "fxamp", "clipped"])
def test_what_is_in_use_at_the_peak_is_all_of_it(counted: dict[str, Count], way: str) -> None:
    peak = counted[way].peak
    assert sum(buffer.bytes for buffer in peak.buffers) == peak.bytes > 0
    assert sorted(peak.buffers, key=lambda buffer: -buffer.bytes) == list(peak.buffers)


def test_a_peak_names_what_waits_for_the_backward_of_another_graph(tmp_path: Path, counting: Counting) -> None:
    """Each product keeps its result. The second one's backward writes over its own, and multiplies what it wrote."""
    file = tmp_path / "two.py"
    file.write_text(TWO_GRAPHS)
    count = counting(Workload(str(file), dtype="float32", optimizer="none"), Way())
    peak, size = count.peak, 4 << 20
    assert count.graphs == 2 and sum(buffer.bytes for buffer in peak.buffers) == peak.bytes
    assert peak.stage == "backward" and peak.kernel == 2
    assert sorted((b.kind, b.stage, b.op) for b in peak.buffers if b.bytes == size) == [
        ("kept", "forward", "mm"),
        ("temporary", "backward", "mm"),
        ("temporary", "backward", "sigmoid_backward"),
    ]


def test_what_is_kept_is_as_large_as_it_is_however_often_it_is_read(tmp_path: Path, counting: Counting) -> None:
    """The backward reads the scale of 8 bits' blocks for each element: 128 times."""
    file = tmp_path / "layers.py"
    file.write_text(LAYERS)
    count = counting(Workload(str(file), dtype="bfloat16", optimizer="none"), Way("cuda-bfloat16-lean"))
    scales = {(b.bytes, b.module) for b in count.peak.buffers if b.kind == "kept" and b.shape[1:] == (2, 1)}
    assert {(4096 * 2 * 2, f"products.{layer}") for layer in range(4)} <= scales
    assert {size for size, _ in scales} == {4096 * 2 * 2} and all(module for _, module in scales)


def test_a_scaled_losss_gradient_takes_the_place_of_the_logits(tmp_path: Path, counting: Counting) -> None:
    """As without a scale, which makes the kernel longer: Inductor divides a kernel of too many ops."""
    file = tmp_path / "classes.py"
    file.write_text(CROSS_ENTROPY)
    torch, ours = (
        counting(Workload(str(file), dtype="float16", optimizer="none"), way) for way in (Way(), Way("auto"))
    )
    assert torch.peak.stage == "backward" and torch.peak.buffers[0].bytes == 2 * 512 * 4096
    assert torch.peak.bytes == ours.peak.bytes


@pytest.mark.exhaustive
def test_gradients_that_the_backward_steps_do_not_pile_up(tmp_path: Path, counting: Counting) -> None:
    """Five weights of 64 MiB: one gradient at a time, besides the 16-bit product that it is cast from."""
    (tmp_path / "wide.py").write_text(LAYERS.replace("256, 256", "4096, 4096").replace("(4096, 256)", "(64, 4096)"))
    (tmp_path / "steps.toml").write_text('extends = ["cuda-bfloat16"]\n[optimizer]\nin_backward = true\n')
    workload = Workload(str(tmp_path / "wide.py"), dtype="bfloat16")
    usual, steps = (counting(workload, Way(policy)) for policy in ("cuda-bfloat16", str(tmp_path / "steps.toml")))
    weight = 4 * 4096 * 4096
    bytes_kept = sum(value.bytes for value in usual.kept)
    assert usual.gradients == 5 * (weight + 4 * 4096) and steps.gradients == 0
    assert usual.peak.bytes > usual.gradients and steps.peak.bytes < bytes_kept + 2 * weight
    assert steps.bytes("step") == usual.bytes("step") and steps.bytes("backward") <= usual.bytes("backward")


def test_peak_lists_so_many_buffers_and_the_moment(
    uncompiled: list[tuple[Workload, Way]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["cost", "--policy", "auto", "--layers", "2", "4", "--peak", "1"]
    assert bench.main([*arguments, "--json"]) == 0
    peaks = json.loads(capsys.readouterr().out)["peaks"]
    assert [(peak["bytes"], len(peak["buffers"])) for peak in peaks] == [(60, 1), (60, 1), (120, 1), (120, 1)]
    assert [peak["way"] for peak in peaks] == ["torch.compile + autocast", "fxamp under autocast"] * 2
    assert peaks[0]["buffers"][0]["module"] == "head" and "layers 2" in peaks[0]["title"]
    assert bench.main(arguments) == 0
    text = capsys.readouterr().out
    assert "6e-05 MB in the backward, at kernel 3 of 9: mm in head n.py:4" in text and "1 others" in text


def test_syncs_are_what_the_host_waits_for(counted: dict[str, Count]) -> None:
    assert {way: count.syncs for way, count in counted.items()} == {"torch": 0, "fxamp": 0, "clipped": 0}
    waits = [Kernel("forward", "eager", ops, (), ()) for ops in ("_local_scalar_dense", "copy to the host", "add")]
    assert replace(counted["torch"], kernels=waits).syncs == 2
    taken: list[Kernel] = []
    with FakeTensorMode(), EagerOps(taken.append):
        torch.ones(2, device="meta").add(1).to("cpu")
    assert [kernel.ops for kernel in taken if "host" in kernel.ops] == ["copy to the host"]


def test_numbers_extrapolate_over_layers() -> None:
    rows = [row("torch", "", _count(layers)) for layers in (2, 4)]
    assert extrapolated((2, 4), rows, 12) == row("torch", "", _count(12))


def test_the_peak_of_a_deeper_model_is_no_less_than_all_its_gradients() -> None:
    rows = [row("torch", "", replace(_count(layers), gradients=25 * (layers - 1))) for layers in (2, 4)]
    assert (extrapolated((2, 4), rows, 3).peak, extrapolated((2, 4), rows, 12).peak) == (90, 360)
    rows = [row("torch", "", replace(_count(layers), gradients=40 * (layers - 2))) for layers in (2, 4)]
    assert (extrapolated((2, 4), rows, 3).peak, extrapolated((2, 4), rows, 12).peak) == (90, 400)


def test_estimate_takes_products_by_flops_and_the_rest_by_bytes() -> None:
    numbers = row("torch", "", _count(1))
    assert numbers.milliseconds(Rates(bandwidth=1000, flops16=100)) == pytest.approx(1e3 * (300 / 1000 + 50 / 100))


def _count(layers: int) -> Count:
    kernels = [
        Kernel("forward", "triton", "add", (Access("a", 100, "float32"),), (Access("b", 100, "float16"),), ("n.py:3",)),
        Kernel("forward", "matmul", "mm", (Access("b", 10, "float16"),), ()),
        Kernel("step", "by hand", "AdamW", (Access("c", 100, "float32"),), (), launches=2),
    ]
    values = [Buffer(10, "float16", (5,), "mm", "head", "n.py:4")]
    buffers = tuple(Buffer(size * layers, "float16", (5,), "mm", "head", "n.py:4") for size in (20, 10))
    peak = Peak(30 * layers, "backward", 3, 9, "mm", "head", "n.py:4", buffers)
    return Count(kernels * layers, {"float16": 50 * layers}, kept=values * layers, graphs=1, peak=peak)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Workload, Way]]:
    """The requests of a command whose counts are made up."""
    asked: list[tuple[Workload, Way]] = []

    def made_up(requests: Iterable[tuple[Workload, Way]]) -> Iterator[Count]:
        for workload, way in requests:
            asked.append((workload, way))
            yield _count(workload.sizes.get("layers", 1))

    monkeypatch.setattr(command, "counts", made_up)
    return asked


def test_json_and_tables_hold_every_way_and_the_whole_model(
    uncompiled: list[tuple[Workload, Way]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["cost", "--layers", "2", "4", "--kernels", "1", "--kept", "1"]
    assert bench.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [part["layers"] for part in document["tables"]] == [2, 4, 12]
    assert [r["policy"] for r in document["tables"][0]["rows"]] == ["", "auto", "cuda-float16"]
    assert document["tables"][2]["rows"][0]["bytes"] == 12 * 310
    assert [workload.sizes["layers"] for workload, _ in uncompiled] == [2, 2, 2, 4, 4, 4]
    assert bench.main(arguments) == 0
    text = capsys.readouterr().out
    assert "extrapolated to 12 layers" in text and "n.py:3" in text and "head" in text and "estimate" in text
    assert bench.main([*arguments, "--markdown"]) == 0
    assert "| torch.compile + autocast" in capsys.readouterr().out


def test_every_model_dtype_and_way_is_in_one_table(
    uncompiled: list[tuple[Workload, Way]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["cost", "--every", "--markdown", "--layers", "3"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert len(lines) == len(set(lines)) == 5 * 2 * 2 and len(set(map(repr, uncompiled))) == len(uncompiled) == 80
    asked = {way.policy for workload, way in uncompiled if workload.dtype == "bfloat16"}
    assert asked == {"", "auto", "cuda-bfloat16", "cuda-bfloat16-fast"}
    count = _count(3)
    peak, held = f"{count.peak.bytes / 1e6:.0f}", f"{count.kept_bytes / 1e6:.0f}"
    four = [" / ".join([cell] * 4) for cell in ("0.00", "12", held, peak)]
    assert any(
        line.startswith("| `bert-base` | bfloat16 | loss | " + " | ".join(four)) for line in map(_squeezed, lines)
    )


def _squeezed(line: str) -> str:
    return " ".join(line.split())


@pytest.mark.parametrize(
    ("compiler", "expected"),
    [
        ("", r"none of g\+\+, clang\+\+, c\+\+ exists; install the package g\+\+"),
        ("/nowhere/g++", r"CXX is '/nowhere/g\+\+', which does not exist; install the package g\+\+"),
        ("false", "cannot be made to compile"),
    ],
)
def test_without_a_working_compiler_there_is_a_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str, expected: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    if not compiler:
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(OptionError, match=expected):
        hooks.compiled_hooks(hooks.torch_home(), torch.__version__)
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(("build", "name"), [("hip = '7.2'", "ROCm"), ("xpu = '20260100'", "XPU")])
def test_a_torch_that_is_built_for_other_gpus_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: str, name: str
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0+x'\ncuda = hip = xpu = None\n{build}\n")
    monkeypatch.setattr(hooks, "torch_home", lambda: tmp_path)
    with pytest.raises(OptionError, match=f"torch 2.13.0.x is for {name}; accepted: builds for CUDA, and CPU"):
        hooks.prepare_torch()


@pytest.mark.exhaustive
@needs_compiler
def test_a_gpu_that_is_there_is_not_the_one_that_is_counted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it
    assert printed_modules(SEEN) == [0, False, simulated_gpu.H100.name]


@pytest.mark.exhaustive
def test_the_generated_text_moves_the_bytes_that_were_counted_before_it(tmp_path: Path, counting: Counting) -> None:
    file = tmp_path / "net.py"
    file.write_text(PROGRAM.replace("self.table[index]", "self.table").replace("5000", "64"))
    count = counting(Workload(str(file), dtype="bfloat16", optimizer="none"), Way("cuda-bfloat16"))
    expected = sum(kernel.bytes for kernel in count.kernels if kernel.kind == "triton")
    texts = generated(file, "cuda-bfloat16")
    assert sum(map(generated_bytes, texts)) == pytest.approx(expected, rel=0.05) and len(texts) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_no_memory_of_a_counted_model_is_left(tmp_path: Path, fails: bool) -> None:
    """Each policy is counted with a model of its own, and torch holds modules that it has compiled."""
    file = tmp_path / "tied.py"
    made = "model, inputs = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (ones(2),)"
    file.write_text(f"from torch import nn, ones\n{made}\nmodel[1].weight = model[0].weight\n")
    with suppress(OptionError), fake_workload(Workload(str(file)), FakeTensorMode()) as called:
        if fails:
            raise OptionError("it cannot be counted")
    assert isinstance(called.model, nn.Sequential)
    parameters = list(called.model.parameters())
    assert len(parameters) == 3 and all(parameter.is_meta for parameter in parameters)
