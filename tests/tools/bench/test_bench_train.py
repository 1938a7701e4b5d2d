"""fxamp-bench train on tiny sizes: the numbers fit together, and wrong options are refused."""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.checks.commands import mistake
from support.machines.forked import ForkedWorker

import fxamp
from fxamp.tools.bench import command as bench
from fxamp.tools.bench.models import MODELS, SIZES, build
from fxamp.tools.bench.process import ContenderFailed, Process
from fxamp.tools.bench.report import Report, spread
from fxamp.tools.bench.train import command, gradient, measure, worker
from fxamp.tools.bench.train.experiment import CONTENDERS, Experiment, policy_contenders
from fxamp.tools.bench.train.measure import compare
from fxamp.tools.bench.train.observe import observe
from fxamp.tools.bench.train.result import Comparison, Measured
from fxamp.tools.bench.train.table import table
from fxamp.tools.bench.train.training import Training
from fxamp.tools.bench.train.turns import Runner, order
from fxamp.tools.common.machine import machine

PLAN = Experiment("mlp", "tiny", "cpu", dtype="float16", steps=2, rounds=3, lowering="eager")
_NAMES = "eager-float32,eager-autocast,fxamp"
_POLICY = 'extends = ["cpu-float16"]\n[match]\ndevice = "cpu"\n[optimizer]\nstate = "8bit"\n'


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a policy that packs the optimizer's state."""
    file = tmp_path_factory.mktemp("policies") / "packed.toml"
    file.write_text(_POLICY, encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def report(policy: str) -> Report:
    """One model in float16: three contenders and a policy in processes of their own, each started twice."""
    line = f"--size tiny --lowering eager --steps 2 --rounds 3 --starts 2 --contenders {_NAMES} --policy {policy}"
    line += " --baseline eager-float32 --policy-optimizer"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fxamp.tools.bench.process.subprocess.Popen", ForkedWorker)
        return command.run(command.parser("train").parse_args(line.split()), lambda _: None)


@pytest.fixture
def document(report: Report) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(json.dumps(report.document))
    return loaded


def _contender(document: dict, name: str) -> dict:
    return next(contender for contender in document["contenders"] if contender["name"] == name)


def test_the_first_loss_is_the_same_wherever_float32_computes_it(document: dict) -> None:
    """Eager float32 in its own process, and torch's float32 here: the same seed and the same data."""
    model, batches = build("mlp", "tiny", PLAN.seed, 4)
    first = model(**batches[0]).item()
    assert _contender(document, "eager-float32")["losses"][0] == first
    for name in ("eager-autocast", "fxamp"):
        assert _contender(document, name)["losses"][0] == pytest.approx(first, rel=2**-8)


def test_fxamp_counts_the_casts_that_eager_autocast_runs(document: dict) -> None:
    eager, ours = (_contender(document, name)["observed"] for name in ("eager-autocast", "fxamp"))
    assert ours["casts"] == eager["casts"] > 0
    assert ours["cast_bytes"] == eager["cast_bytes"] > 0
    assert _contender(document, "eager-float32")["observed"]["casts"] == 0


def test_medians_lie_within_the_spread_and_the_baselines_ratios_are_one(document: dict) -> None:
    assert document["baseline"] == "eager-float32"
    for contender in document["contenders"]:
        assert [len(rounds) for rounds in contender["seconds"]] == [3, 3]
        for values in (contender["step"], contender["step_ratio"]["spread"], contender["cpu_ratio"]["spread"]):
            assert 0 < values["low"] <= values["median"] <= values["high"]
        seconds = [value for rounds in contender["seconds"] for value in rounds]
        assert min(seconds) <= contender["step"]["median"] <= max(seconds)
    base = _contender(document, "eager-float32")
    for ratio in (base["step_ratio"], base["cpu_ratio"]):
        assert {*ratio["spread"].values(), *ratio["starts"]} == {1.0} and len(ratio["starts"]) == 2
    assert {value for value in base["ratios"].values() if value is not None} == {1.0}
    assert base["loss_distance"] == 0


def test_a_model_may_have_other_sizes() -> None:
    changed = replace(PLAN, changed={"width": 24, "layers": 2})
    training = Training(changed, CONTENDERS["eager-float32"])
    assert {parameter.shape[-1] for parameter in training.module.parameters()} == {24, 10}
    comparison = Comparison(changed, machine("cpu", 1), "", "", (Measured("a", "a", seconds=((1.0,),), losses=(1.0,)),))
    assert "mlp (tiny, width 24, layers 2)" in table(comparison)


def test_contenders_compile_at_once_and_step_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = threading.Barrier(2)

    class Contender:
        def __enter__(self) -> "Contender":
            return self

        def __exit__(self, *error: object) -> None: ...

        def ask(self, task: Callable[..., object], **arguments: object) -> dict[str, object]:
            if task is worker.steps:
                assert threading.current_thread() is threading.main_thread()
            else:
                meeting.wait(timeout=30)
            return {"seconds": 1.0}

    monkeypatch.setattr(measure, "Process", lambda *_, **__: Contender())
    runners = [Runner("fxamp"), Runner("eager-float32")]
    assert measure._start(runners, 0, replace(PLAN, jobs=2, rounds=2), tmp_path, None, lambda _: None)
    assert [(runner.failed, len(runner.rounds[0]), "end" in runner.answers[0]) for runner in runners] == [
        ("", 2, True)
    ] * 2


@pytest.mark.exhaustive
@pytest.mark.inductor
def test_a_warm_start_finds_every_graph_in_the_caches() -> None:
    experiment = replace(PLAN, lowering="inductor", steps=1, rounds=1)
    comparison = compare(
        experiment, ["eager-autocast", "compile-autocast", "fxamp"], "compile-autocast", lambda _: None
    )
    eager, torchs, ours = comparison.contenders
    assert eager.hits == eager.misses == 0 and eager.cold_cpu is None
    for contender in (torchs, ours):
        assert contender.hits > 0 and contender.misses == 0, contender.label
        assert contender.cold_cpu > 0 and contender.warm_cpu > 0
    assert f"{ours.hits} of {ours.hits}" in table(comparison)


def test_every_contender_trained_as_many_steps(document: dict) -> None:
    """Three to warm up, and in each round one to refill the caches."""
    assert {len(contender["losses"]) for contender in document["contenders"]} == {3 + 3 * (2 + 1)}
    assert all(contender["losses"][-1] < contender["losses"][0] for contender in document["contenders"])


def test_a_policy_is_a_contender_and_its_table_packs_the_optimizer_s_state(document: dict, policy: str) -> None:
    ours, exact = _contender(document, policy), _contender(document, "fxamp")
    assert ours["label"] == f"fxamp {policy}" and document["experiment"]["dtype"] == "float16"
    assert ours["loss_scale"] == exact["loss_scale"] > 1
    assert ours["losses"][0] == exact["losses"][0] and ours["gradient_error"] == exact["gradient_error"]
    assert ours["losses"][-1] != exact["losses"][-1]
    lasting, exact_lasting = (one["observed"]["memory_peak"] - one["observed"]["memory_step"] for one in (ours, exact))
    weights = 3 * 64 * 64 + 64 * 10  # each with two moments, 8 bits with a scale for each 256 elements instead of 32
    assert exact_lasting - lasting == pytest.approx(2 * weights * (4 - 1 - 4 / 256), rel=0.05)


def test_the_gradient_s_error_is_that_against_float64(document: dict) -> None:
    def gradient(dtype: torch.dtype, autocast: bool) -> torch.Tensor:
        model, (batch, *_) = build("mlp", "tiny", PLAN.seed, 4)
        model.to(dtype)
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = model(**inputs)
        (loss * 2**16).backward()
        return torch.cat([parameter.grad.double().flatten() / 2**16 for parameter in model.parameters()])

    true = gradient(torch.float64, autocast=False)
    for name, autocast in (("eager-float32", False), ("eager-autocast", True)):
        expected = (gradient(torch.float32, autocast) - true).norm() / true.norm()
        # The loss scale may be another power of two, and float32's sums of many threads another order.
        assert _contender(document, name)["gradient_error"] == pytest.approx(expected.item(), rel=0.05), name
    assert _contender(document, "fxamp")["gradient_error"] == _contender(document, "eager-autocast")["gradient_error"]


def test_a_model_that_is_too_large_has_no_error_of_the_gradient(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gradient, "MOST_PARAMETERS", 10)
    assert not gradient.Reference(PLAN).write(tmp_path / "reference.pt") and not list(tmp_path.iterdir())
    monkeypatch.setattr("fxamp.tools.bench.process.subprocess.Popen", ForkedWorker)
    monkeypatch.setattr(measure, "Process", lambda *_: contextlib.nullcontext(_Refusing()))
    assert measure._reference(PLAN, tmp_path / "reference.pt", lambda _: None) == (
        None,
        "the model has more than 0 million parameters, too many for float64",
    )


class _Refusing:
    """A process that answers False."""

    def ask(self, *_: object) -> bool:
        return False


def test_no_contender_is_always_first_or_always_after_the_same_one() -> None:
    orders = [order("abcd", number) for number in range(8)]
    assert {one[0] for one in orders} == set("abcd") and all(sorted(one) == list("abcd") for one in orders)
    before = {pair for one in orders for pair in pairwise(one)}
    assert {first for first, second in before if second == "b"} >= {"a", "c"}


def test_the_markdown_holds_the_numbers_of_the_json(report: Report, document: dict) -> None:
    text = report.markdown
    assert document["machine"]["device"] in text.splitlines()[0]
    contenders = document["contenders"]
    rows = [cells for line in text.splitlines() if len(cells := _cells(line)) > 1]
    columns: dict[str, tuple[str, ...]] = {}
    for part in batched_rows(rows, len(contenders) + 2):
        columns |= {title: cells for (title, _, *cells) in zip(*part, strict=True)}
    assert columns[""] == [contender["label"] for contender in contenders]
    assert columns["casts"] == [str(contender["observed"]["casts"]) for contender in contenders]
    steps = [1e3 * contender["step"]["median"] for contender in contenders]
    assert [float(cell) for cell in columns["step, ms"]] == pytest.approx(steps, rel=1e-2)
    ratios = [contender["step_ratio"] for contender in contenders]
    assert [cell.split()[0] for cell in columns["ratio"]] == [f"{ratio['spread']['median']:.2f}" for ratio in ratios]
    assert columns["per start"] == [" ".join(f"{start:.2f}" for start in ratio["starts"]) for ratio in ratios]
    (ratio, amount, unit) = columns["peak memory"][0].replace("(", "").replace(")", "").split()
    shown = float(amount) * {"kB": 1e3, "MB": 1e6}[unit]
    assert ratio == "1.00" and shown == pytest.approx(contenders[0]["observed"]["memory_peak"], rel=5e-3)


def batched_rows(rows: list[list[str]], size: int) -> list[list[list[str]]]:
    assert len(rows) % size == 0
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def test_casts_are_those_of_fxamps_report() -> None:
    training = Training(PLAN, CONTENDERS["fxamp"])
    for _ in range(2):
        training.step()
    assert observe(training)["casts"] == fxamp.report(training.compiled).casts > 0


def test_memory_is_that_of_the_tensors_and_of_what_the_forward_keeps() -> None:
    training = Training(PLAN, CONTENDERS["eager-float32"])
    training.step()
    observed = observe(training)
    parameters = 4 * observed["parameters"]
    assert observed["parameters"] == 3 * (64 * 64 + 64) + 2 * 64 + 64 * 10 + 10
    batches = 4 * (32 * 64 * 4 + 32 * 8)
    # Parameters, two moments, gradients at the end of the backward, and the batches; the rest are activations.
    assert observed["memory_peak"] >= 4 * parameters + batches
    sizes = {"x": 32 * 64 * 4}
    # GELU keeps its input in each of three layers, the layers after the first their own, the norm its own.
    assert observed["memory_kept"] >= 6 * sizes["x"]
    assert observed["memory_peak"] <= 4 * parameters + batches + 2 * observed["memory_kept"]
    assert observed["memory_peak"] - observed["memory_step"] == pytest.approx(3 * parameters + batches, rel=0.01)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("mlp",)])
def test_every_model_trains_and_every_full_size_is_written_down(name: str) -> None:
    assert set(MODELS[name].sizes) == set(SIZES)
    training = Training(replace(PLAN, model=name, dtype="auto"), CONTENDERS["eager-float32"])
    for _ in range(5):
        training.step()
    assert training.losses[4] < training.losses[0]


@pytest.mark.parametrize("all_results", [False, True])
def test_the_loss_leaves_alone_unless_all_results_are_asked_for(all_results: bool) -> None:
    plan = replace(PLAN, model="vit-b", all_results=all_results)
    training = Training(plan, CONTENDERS["eager-float32"])
    result = training.compiled(**training.batches[0])
    assert isinstance(result, torch.Tensor) is not all_results and hasattr(result, "logits") is all_results
    training.step()
    assert training.losses == [getattr(result, "loss", result).item()]


def test_a_policy_s_optimizer_is_in_use_if_it_is_asked_for(policy: str) -> None:
    plan = replace(PLAN, policies=(policy,))
    training = Training(plan, plan.contenders[policy])
    assert training.optimizer.defaults["fused"] and "--policy-optimizer" in training.notes[0]
    training = Training(replace(plan, policy_optimizer=True), plan.contenders[policy])
    assert not training.optimizer.defaults["fused"] and not training.notes


def test_auto_leaves_the_dtype_to_fxamp() -> None:
    training = Training(replace(PLAN, dtype="auto"), CONTENDERS["fxamp"])
    training.step()
    assert training.loss_scale is None
    assert {graph.policy for graph in fxamp.report(training.compiled).graphs} <= {"float32", "cpu-bfloat16"}


def test_a_contender_that_fails_gives_its_reason_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ContenderFailed, match=r"^KeyError: 'no-such'$"):
        Process(worker.start, PLAN, "no-such", cache=tmp_path)
    with pytest.raises(ContenderFailed, match=r"^its process ended: status 3$"):
        Process(os._exit, 3)
    failed = Measured("fxamp", "fxamp", failed="RuntimeError: no")
    fine = Measured("eager-float32", "eager float32", seconds=((1.0, 2.0),), losses=(1.0,))
    comparison = Comparison(PLAN, {"device": "d"}, "fxamp", "eager-float32", (fine, failed))
    assert "fxamp failed: RuntimeError: no" in table(comparison)
    assert comparison.time_ratio(fine) is None and "No ratios" in table(comparison)


def test_ratios_are_taken_round_by_round() -> None:
    """Both slow down threefold in the second round: that is drift, not a difference. The starts differ by a half."""
    base = Measured("a", "a", seconds=((1.0, 3.0, 1.0), (1.0, 1.0, 1.0)), losses=(1.0,))
    other = Measured("b", "b", seconds=((2.0, 6.0, 2.0), (3.0, 3.0, 3.0)), losses=(1.5,))
    comparison = Comparison(PLAN, {"device": "d"}, "a", "a", (base, other))
    ratio = comparison.time_ratio(other)
    assert ratio is not None and ratio.starts == (2.0, 3.0) and ratio.doubt == 0.4
    assert (ratio.spread.low, ratio.spread.median, ratio.spread.high) == (2.0, 2.5, 3.0)
    assert comparison.loss_distance(other) == 0.5
    assert vars(spread([4.0, 1.0, 3.0, 2.0, 5.0])) == {"low": 2.0, "median": 3.0, "high": 4.0}


def test_a_missing_package_is_one_clear_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench.main(["train", "--model", "gpt2-124m"]) == 2
    assert "pip install transformers" in capsys.readouterr().err


def test_the_machine_is_named() -> None:
    facts = machine("cpu", 2)
    assert facts["device"].endswith(", 2 threads") and facts["torch"] == torch.__version__


def _first_losses(name: str) -> list[float]:
    experiment = replace(PLAN, model="llama-8b-2-layers", dtype="bfloat16")
    training = Training(experiment, {**policy_contenders([name]), **CONTENDERS}[name])
    for _ in range(2):
        training.step()
    return training.losses


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["fp8", "fp8-rowwise"])
def test_torchao_and_fxamp_train_alike_in_fp8(recipe: str) -> None:
    """The same products in fp8 at the same scales: the same first loss, which no other contender has."""
    pytest.importorskip("torchao.float8", exc_type=ImportError)
    ours, theirs = _first_losses(f"cpu-bfloat16-{recipe}"), _first_losses(f"torchao-{recipe}")
    assert ours[0] == theirs[0] != _first_losses("eager-autocast")[0]
    assert ours[1] == pytest.approx(theirs[1], rel=1e-3)


def test_fp8_that_cannot_run_here_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "--contenders torchao-fp8: needs torchao, which is not" in mistake(
        bench.main, ["train", "--contenders", "torchao-fp8"], capsys
    )
