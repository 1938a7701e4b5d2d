"""fxamp-policy calibrate: it finds planted range problems, its patch cures them, and a sound model gets none."""

import io
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_runs import run, written

import fxamp
from fxamp.policy import Category, Policy
from fxamp.policy.model.module_globs import covers_module
from fxamp.tools.policy.batches import load_work
from fxamp.tools.policy.calibrate.evidence import gather
from fxamp.tools.policy.calibrate.ranges import Format, Range
from fxamp.tools.policy.calibrate.rules import globs_for
from fxamp.tools.policy.calibrate.troubles import share
from fxamp.tools.policy.command import main

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(4, 8), nn.Linear(8, 4), gain

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)) * self.gain) / self.gain

class Net(nn.Module):
    def __init__(self, gains):
        super().__init__()
        self.layers = nn.ModuleList([Block(gain) for gain in gains])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

torch.manual_seed(0)
model = Net([{gains}])

def batches():
    for seed in range(3):
        torch.manual_seed(seed)
        yield (torch.randn(3 + seed, 4),)

def loss(output):
    return output.square().mean() * {factor}
"""


def planted(tmp_path: Path, gains: str, factor: str = "1.0") -> str:
    return written(tmp_path, MODEL.format(gains=gains, factor=factor))


def outputs(file: str, policy: Policy) -> list[torch.Tensor]:
    work = load_work(file, lambda text: None)
    return [fxamp.rewrite(work.model, batch.args, policy=policy)(*batch.args) for batch in work.batches()]


def test_a_planted_overflow_is_found_and_the_patch_cures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, patch = planted(tmp_path, "1.0, 1e6, 1e6", "0.1"), tmp_path / "patch.toml"
    assert not all(bool(output.isfinite().all()) for output in outputs(file, Policy.load("cpu-float16")))
    status, out, err = run(capsys, "calibrate", file, "--output", str(patch))
    assert (status, out) == (0, "")
    policy = Policy.load(patch)
    added = policy.rules[len(Policy.load("cpu-float16").rules) :]
    assert {(rule.ops, rule.modules) for rule in added} == {
        (("aten::mul.Tensor", "aten::div.Tensor"), ("layers.1", "layers.2")),
        (("aten::linear",), ("layers.1.down", "layers.2.down")),
    }
    assert all(rule.cast is Category.FP32 and "exceed float16's 65504" in rule.why for rule in added)
    assert policy.loss_scale is not None and policy.loss_scale.init_scale == 65536.0
    exact = outputs(file, Policy("none", "cpu", "float16"))
    for output, reference in zip(outputs(file, policy), exact, strict=True):
        torch.testing.assert_close(output.float(), reference, rtol=0.02, atol=0.02)
    assert "float32 for 2 of 3" in err and "batch 3" not in err


def test_messages_are_lines_above_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    file = written(tmp_path, "import torch\nmodel, inputs = torch.nn.Linear(2, 2), torch.ones(1, 2)")
    assert main(["calibrate", file, "--output", str(tmp_path / "out.toml")]) == 0
    for line in terminal.getvalue().splitlines():
        assert line.find("fxamp-policy calibrate: ") < 1, line


def test_siblings_that_agree_share_a_glob(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "calibrate", planted(tmp_path, "1e6, 1e6, 1e6"))
    assert status == 0
    assert {glob for rule in Policy.loads(out).rules for glob in rule.modules} == {"layers.*", "layers.*.down"}


def test_the_numbers_are_those_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import torch\nclass M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    text += "        self.w = torch.nn.Parameter(torch.eye(4))\n    def forward(self, x):\n        return x @ self.w\n"
    text += (
        "model = M()\nbatches = [(torch.tensor([[0.0, 1.0, 2.0, 7e4]]),), (torch.tensor([[1.0, 1.0, 1.0, 9e4]]),)]\n"
    )
    status, out, err = run(capsys, "calibrate", written(tmp_path, text))
    rule = Policy.loads(out).rules[-1]
    assert rule.why == (
        "Calibrated: matmul in the root module: 29% of 7 nonzero values of the input exceed float16's 65504, the "
        "largest is 9e+04."
    )
    assert rule.modules == () and rule.ops == ("aten::matmul",)
    assert (status, "the loss is the sum of the output" in err) == (0, True)


def test_gradients_that_vanish_are_found_and_a_scale_saves_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = planted(tmp_path, "1.0", "1e-8")
    _, out, _ = run(capsys, "calibrate", file, "--loss-scale", "1")
    calibrated = [rule for rule in Policy.loads(out).rules if rule.why.startswith("Calibrated")]
    assert calibrated and all("of the gradient at the" in rule.why for rule in calibrated)
    _, out, _ = run(capsys, "calibrate", file, "--loss-scale", "2097152")
    assert not [rule for rule in Policy.loads(out).rules if rule.why.startswith("Calibrated")]
    _, out, _ = run(capsys, "calibrate", file, "--loss-scale", "1", "--inference")
    assert not [rule for rule in Policy.loads(out).rules if rule.why.startswith("Calibrated")]
    assert "loss_scale" not in out


def test_the_loss_scale_is_lowered_until_no_gradient_overflows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, err = run(capsys, "calibrate", planted(tmp_path, "1.0", "1e3"))
    match = re.search(r"lowered from 65536 to (\d+)", err)
    assert match is not None
    scale = float(match[1])
    assert Policy.loads(out).loss_scale.init_scale == scale  # type: ignore[union-attr]
    assert "overflow" not in "".join(rule.why for rule in Policy.loads(out).rules if rule.why.startswith("Cal"))
    _, out, _ = run(capsys, "calibrate", planted(tmp_path, "1.0", "1e3"), "--loss-scale", str(2 * scale))
    assert "exceed float16's 65504" in out


def test_bfloat16_has_no_loss_scale_and_no_trouble_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "calibrate", planted(tmp_path, "1e6"), "--policy", "cpu-bfloat16")
    assert status == 0 and "[[rule]]" not in out and "loss_scale" not in out
    assert Policy.loads(out) == Policy.load("cpu-bfloat16")


def test_another_devices_policy_is_judged_by_cpu_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "calibrate", planted(tmp_path, "1e6"), "--policy", "cuda-float16")
    assert status == 0 and Policy.loads(out).device == "cuda" and "[[rule]]" in out
    assert "what policy 'cuda-float16' casts on cuda, with the float32 values of cpu kernels" in err


def test_a_policy_file_is_extended_from_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = ["cpu-float16"]\n[loss_scale]\ninit_scale = 8.0\nmin_scale = 4.0\n')
    patch = tmp_path / "patch.toml"
    status, _, _ = run(capsys, "calibrate", planted(tmp_path, "1.0"), "--policy", str(mine), "--output", str(patch))
    assert status == 0 and 'extends = ["mine.toml"]' in patch.read_text()
    assert Policy.load(patch).loss_scale == Policy.load(mine).loss_scale
    status, _, err = run(capsys, "calibrate", planted(tmp_path, "1.0"), "--policy", str(mine), "--output", str(mine))
    assert status == 2 and "mine.toml' is a file that is read" in err


INSIDE = """
import torch
from torch.utils.checkpoint import checkpoint

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.mm(x, x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.side = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def block(self, x):
        return (self.inner(x) * 1e6).tanh()

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=False)
        x = torch.cond(x.sum() > 1e9, lambda y: torch.addmm(y, y, y), lambda y: torch.bmm(y[None], y[None])[0], (x,))
        with torch.autocast("cpu", dtype=torch.float16):
            return self.side(Cube.apply(x))

torch.manual_seed(0)
model, inputs = Net(), torch.randn(4, 4)
"""


def test_bodies_are_watched_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, INSIDE)
    status, out, err = run(capsys, "calibrate", file)
    assert status == 0, err.splitlines()[-1]
    assert "mul.Tensor" in out and "exceed float16's 65504" in out
    line = next(line for line in err.splitlines() if "not watched" in line)
    assert "addmm in" in line and "mm in" in line and "bmm" not in line
    samples = gather(load_work(file, print), Policy.load("cpu-float16"), True).samples
    (result,) = [s.forward for s in samples if s.place.module == "side" and s.what == "result"]
    assert result.amax != torch.tensor(result.amax).half().item(), "the region would have rounded it"
    ops = {"aten::tanh.default", "aten::bmm.default", "aten::linear.default"}
    assert ops <= {sample.place.op for sample in samples if sample.gradient.count}


#: Numbers whose exponents lie around float16's limits, and whose mantissas lie around the last one that rounds down.
NUMBERS = st.builds(
    lambda mantissa, exponent, sign: sign * mantissa * 2.0**exponent,
    st.sampled_from([0.0, 0.5, 0.75, 1 - 2.0**-8, 1 - 2.0**-9, 1 - 2.0**-10, 1 - 2.0**-12, 1 - 2.0**-13]),
    st.integers(-30, 30) | st.integers(-140, -120) | st.integers(120, 128),
    st.sampled_from([1, -1]),
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(values=st.lists(NUMBERS, min_size=1, max_size=30), shift=st.integers(-12, 12))
@settings(max_examples=150)
def test_shares_are_those_of_casting(dtype: torch.dtype, values: list[float], shift: int) -> None:
    whole = torch.tensor(values, dtype=torch.float64).float().double()
    counts = Range(Format.of(dtype))
    counts.add(whole[: len(values) // 2].float())
    counts.add(whole[len(values) // 2 :].float())
    known = whole[(whole != 0) & (whole.abs() != torch.finfo(torch.float32).max)]
    cast = (known * 2.0**shift).to(dtype)
    small = (known * 2.0**shift).abs() < torch.finfo(dtype).tiny
    assert counts.count == len(values) and counts.nonzero == known.numel()
    assert counts.overflow(shift) * known.numel() == pytest.approx(int(cast.isinf().sum()))
    assert counts.underflow(shift) * known.numel() == pytest.approx(int(small.sum()))
    most = counts.largest_shift()
    if known.numel():
        assert most is not None and counts.overflow(most) == 0 < counts.overflow(most + 1)
        assert counts.amax == float(known.abs().max())


def test_masks_and_infinities_are_no_overflow() -> None:
    counts = Range(Format.of(torch.float16))
    counts.add(torch.tensor([torch.finfo(torch.float32).min, -math.inf, 1.0]))
    assert (counts.masked, counts.nonfinite, counts.overflow(), counts.amax) == (1, 1, 0.0, 1.0)


@given(
    st.lists(st.sampled_from(["a.0.x", "a.1.x", "a.2.x", "a.0", "a.1", "x", "b.0.a.1.x", "b.1.a.1.x"]), unique=True),
    st.data(),
)
@settings(max_examples=150)
def test_globs_cover_what_is_wanted_and_no_more_than_its_paths_do(known: list[str], data: st.DataObject) -> None:
    paths = [path for path in known if data.draw(st.booleans())]
    globs = globs_for(paths, known)
    covered = {path for path in known if any(covers_module(glob, path) for glob in globs)}
    below = {path for path in known if any(path == w or path.startswith(f"{w}.") for w in paths)}
    assert covered == below


@pytest.mark.parametrize(
    ("part", "text"), [(1.0, "100%"), (0.996, "99.6%"), (0.99499, "99%"), (0.19, "19%"), (1e-6, "0.0001%"), (0.0, "0%")]
)
def test_shares_are_percentages_in_plain_digits(part: float, text: str) -> None:
    assert share(part) == text


WRITES = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.up(x)
        {}
        return (y.log() if {} else y / 1e6).mean()

torch.manual_seed(0)
model, inputs = Net(), (torch.randn(4, 8),)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("write", "log"), [("y.mul_(30).exp_()", True), ("y.mul_(1e6)", False), ("y[1].mul_(1e6)", False)]
)
def test_what_overflows_in_place_is_charged_to_the_op_that_made_the_tensor(
    write: str, log: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, patch = written(tmp_path, WRITES.format(write, log)), tmp_path / "patch.toml"
    assert not all(bool(output.isfinite().all()) for output in outputs(file, Policy.load("cpu-float16")))
    assert run(capsys, "calibrate", file, "--output", str(patch))[0] == 0
    policy = Policy.load(patch)
    assert any(rule.ops == ("aten::linear",) and rule.cast is Category.FP32 for rule in policy.rules if rule.why)
    exact = outputs(file, Policy("none", "cpu", "float16"))
    for output, reference in zip(outputs(file, policy), exact, strict=True):
        assert torch.allclose(output, reference, rtol=1e-2)
