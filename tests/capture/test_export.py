"""A rewritten module is shipped by torch.export: under its own names, with autocast's results, through a file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxamp


class Net(nn.Module):
    """A buffer and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)
        self.again = self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.body(self.head(self.norm(self.body(x)).relu())))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11 and 2.12, as they load
@pytest.mark.parametrize("exported", [False, True], ids=["module", "exported program"])
def test_it_keeps_its_names_and_gives_autocasts_results(exported: bool, tmp_path: Path) -> None:
    model, x = net(), torch.randn(3, 4)
    source = torch.export.export(model, (x,)) if exported else model
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(x)

    rewritten = fxamp.rewrite(source, (x,), policy="cpu-bfloat16")
    torch.export.save(torch.export.export(rewritten, (x,)), tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2")

    assert list(rewritten.state_dict()) == list(model.state_dict()) and sorted(program.state_dict) == sorted(
        model.state_dict()
    )
    result = program.module()(x)
    assert result.dtype == torch.bfloat16 and torch.equal(result, expected)


NORMS_IN_FLOAT32 = """
extends = ["cpu-float16"]
[[rule]]
id = "norms"
ops = ["layer_norm"]
cast = "fp32"
why = "ONNX's LayerNormalization takes an input and weights of one dtype."
"""


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.down(torch.relu(self.norm(self.up(x)))), -1)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime_is_as_near_to_float64_as_autocast(tmp_path: Path) -> None:
    """Products in float16, with kernels of another library."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model, x = Normed().eval(), torch.randn(3, 4)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        autocast = model(x).double()
    rewritten = fxamp.rewrite(model, (x,), policy=fxamp.Policy.loads(NORMS_IN_FLOAT32))

    program = torch.onnx.export(rewritten, (x,), dynamo=True, verbose=False)
    program.save(tmp_path / "net.onnx")
    session = runtime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})

    assert result.dtype.name == "float16"
    exact = model.double()(x.double()).detach()
    bound = 2 * (autocast - exact).abs().max() + torch.finfo(torch.float16).eps * exact.abs().max()
    assert 0 < (torch.from_numpy(result).double() - exact).abs().max() <= bound


@pytest.mark.exhaustive
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore")
def test_a_package_of_aot_inductor_is_as_near_to_float64_as_autocast(tmp_path: Path) -> None:
    model, x = Normed().eval(), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        autocast = model(x).double()
    rewritten = fxamp.rewrite(model, (x,), policy="cpu-bfloat16")

    exported = torch.export.export(rewritten, (x,))
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "net.pt2"))
    result = torch._inductor.aoti_load_package(path)(x)

    exact = model.double()(x.double())
    assert result.dtype == torch.bfloat16 or result.dtype == torch.float32
    assert (result.double() - exact).norm() <= 2 * (autocast - exact).norm()
