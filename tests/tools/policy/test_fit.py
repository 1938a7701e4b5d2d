"""fxamp-policy fit: what it writes loads and is what it counted, its cache knows its key, its mistakes are one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import mistake
from policy_runs import run, written
from torch import nn

from fxamp.policy import Policy
from fxamp.policy.model.keep import KEPT
from fxamp.tools.bench.command import main as bench
from fxamp.tools.bench.cost.count import Access, Count, Kept, Kernel, Peak
from fxamp.tools.bench.cost.row import Rates
from fxamp.tools.policy.command import main
from fxamp.tools.policy.fit import choice
from fxamp.tools.policy.fit.counts import Counting
from fxamp.tools.policy.fit.decisions import Language
from fxamp.tools.policy.fit.errors import Measuring
from fxamp.tools.policy.fit.gpus import GPUS
from fxamp.tools.policy.fit.layers import scopes, shortened

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList([Block(64) for _ in range(layers)])
        self.head = nn.Linear(64, 256)

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), target)

torch.manual_seed(0)
model = Net({layers})
inputs = (torch.randn(128, 64), torch.randint(256, (128,)))
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts and errors that follow from the number of rules; the result says how many there were."""
    asked: list[Policy] = []

    def count(_: Counting, policy: Policy, *__: Any) -> Count:
        asked.append(policy)
        rules = sum(rule.region == KEPT and rule.keep != "as-is" for rule in policy.rules)
        kernel = Kernel("forward", "triton", "add", (Access("a", 10_000_000 + 1000 * rules, "float32"),), ())
        peak = 4_000_000 - 100_000 * rules
        return Count((kernel,), {}, (Kept(peak, "float32", (1,), "add", "", ""),), 1, 1, 1, Peak(peak))

    def errors(_: Measuring, policy: Policy) -> list[float]:
        asked.append(policy)
        return [1e-3 * (1 + 0.01 * sum(rule.keep == "int8" for rule in policy.rules))]

    monkeypatch.setattr(Counting, "_ask", count)
    monkeypatch.setattr(Measuring, "_errors", errors)
    return lambda: len(asked)


def model(tmp_path: Path, layers: int = 4) -> str:
    return written(tmp_path, MODEL.replace("{layers}", str(layers)))


def test_the_policy_loads_and_is_the_one_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pretended: Callable[[], int]
) -> None:
    out = tmp_path / "mine.toml"
    status, text, _ = run(capsys, "fit", model(tmp_path), "--memory", "4MB", "--output", str(out), "--json")
    document = json.loads(text)
    chosen = next(one for one in document["policies"] if one["name"] == document["chosen"])
    assert status == 0 and chosen["memory"] <= document["memory"] == 4e6
    policy, base = Policy.load(out), Policy.load("cuda-bfloat16")
    assert document["policy"] == out.read_text()
    rules = sum(rule.region == KEPT and rule.keep != "as-is" for rule in policy.rules)
    assert chosen["peak"] == 4_000_000 - 100_000 * rules and chosen["options"]
    assert policy.rules[: len(base.rules)] == base.rules
    assert all("Measured alone, " in rule.why for rule in policy.rules if "--" in rule.id)


def test_a_second_run_counts_nothing_and_writes_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pretended: Callable[[], int]
) -> None:
    file = model(tmp_path)
    first = run(capsys, "fit", file, "--memory", "4MB")
    before = pretended()
    again = run(capsys, "fit", file, "--memory", "4MB")
    assert pretended() == before and first[:2] == again[:2] and "0 counts and 0 errors were new" in again[2]
    written(tmp_path, Path(file).read_text().replace("manual_seed(0)", "manual_seed(1)"))
    run(capsys, "fit", file, "--memory", "4MB")
    assert pretended() > before


def test_another_file_beside_the_model_is_another_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pretended: Callable[[], int]
) -> None:
    beside = tmp_path / "sizes.py"
    beside.write_text("LAYERS = 4\n")
    file = written(tmp_path, "from sizes import LAYERS\n" + MODEL.replace("{layers}", "LAYERS"))
    run(capsys, "fit", file)
    before = pretended()
    beside.write_text("LAYERS = 4  # the same, in other words\n")
    run(capsys, "fit", file)
    assert pretended() > before


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str], pretended: Callable[[], int]) -> None:
    out = tmp_path / "mine.toml"
    status, text, _ = run(capsys, "fit", model(tmp_path), "--memory", "1MB", "--output", str(out))
    assert status == 1 and not out.exists()
    assert "nothing fits: " in text and " are missing" in text and "what brings most: " in text


def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pretended: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, count, calls = model(tmp_path), Measuring._errors, []

    def stops(self: Measuring, policy: Policy) -> list[float]:
        calls.append(policy)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return count(self, policy)

    monkeypatch.setattr(Measuring, "_errors", stops)
    status, text, _ = run(capsys, "fit", file)
    assert status == 130 and "2 errors were new; they are kept" in text
    monkeypatch.setattr(Measuring, "_errors", count)
    before = pretended()
    status, _, err = run(capsys, "fit", file)
    new = int(err.split(" errors were new")[0].split()[-1])
    assert status == 0 and 0 < new < pretended() - before + 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "h10"), "did you mean 'h100'?"),
        (("--memory", "40 apples"), "accepted: a number above 0 with B, KiB"),
        (("--memory", "90GiB"), "--memory 90.0 GiB: the h100 has 80.0 GiB; accepted: up to that"),
        (("--base", "cpu-bfloat16"), "--base cpu-bfloat16: it is for cpu; accepted: a policy for cuda"),
        (("--base", "cuda-bfloat16-leam"), "did you mean 'cuda-bfloat16-lean"),
        (("--prefer", "speed"), "accepted: memory, time, error"),
        (("--output", "mine.json"), "accepted: 'mine.json.toml'"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_counted(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pretended: Callable[[], int],
) -> None:
    assert words in mistake(main, ["fit", model(tmp_path), *arguments], capsys)
    assert pretended() == 0


def test_a_model_without_inputs_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, MODEL.replace("{layers}", "1").replace("inputs =", "batches ="))
    assert "it defines no inputs, which the count takes" in mistake(main, ["fit", file], capsys)


def test_scipy_is_named_where_it_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda _: None)
    assert "'fxamp[fit]'" in mistake(main, ["fit", model(tmp_path)], capsys)


def test_layers_that_are_alike_are_one_with_first_and_last_apart() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))), nn.Linear(3, 1))
    names = [(part.name, part.modules, part.size) for part in scopes(net)]
    assert names == [
        ("first of 1", ("1.0",), 1),
        ("middle of 1", ("1.1", "1.2", "1.3"), 3),
        ("last of 1", ("1.4",), 1),
        ("rest", (".0", ".2"), 1),
    ]
    with shortened(net):
        assert [part.modules for part in scopes(net)][:3] == [("1.0",), ("1.1",), ("1.2",)] and len(net[1]) == 3
    assert len(net[1]) == 5
    (whole,) = scopes(nn.Linear(2, 2))
    assert whole.modules == ()


def test_every_option_is_a_policy_that_loads() -> None:
    base = Policy.load("cuda-bfloat16")
    language, net = Language(base, fp8=True), nn.ModuleList([nn.Linear(8192, 8192, device="meta") for _ in range(4)])
    decisions = language.decisions(scopes(net), net)
    for decision in decisions:
        for option in decision.options[1:]:
            policy = language.policy(base, [option])
            assert policy != base and Policy.loads(policy.dumps()) == policy
    recipes = {option.name for own in decisions if own.name == "products" for option in own.options}
    assert recipes >= {"fp8 tensorwise", "fp8 rowwise", "fp8 rowwise_with_gw_hp"}
    assert not any(own.name == "products" for own in Language(base, fp8=False).decisions(scopes(net), net))


def test_all_options_of_lean_together_are_lean() -> None:
    base, lean = Policy.load("cuda-bfloat16"), Policy.load("cuda-bfloat16-lean")
    language = Language(base, fp8=False)
    words = {
        "8-bit integers, norms' inputs in 16 bits",
        "activations, norms, gates",
        "looked up again",
        "in chunks of 2048",
    }
    options = [o for own in language.decisions(scopes(None), None) for o in own.options if o.name in words]
    ids = [rule.id for rule in language.policy(base, options).rules]
    extra = {"kept-images", "kept-pointwise-convolutions"}
    assert [name for name in ids if name not in extra] == [rule.id for rule in lean.rules]


@pytest.mark.exhaustive
@pytest.mark.inductor
def test_the_counts_are_those_of_fxamp_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = model(tmp_path, layers=2), tmp_path / "mine.toml"
    arguments = ("--prefer", "memory", "--frontier", "1", "--gpu", "a100", "--output", str(out), "--json")
    status, text, _ = run(capsys, "fit", file, *arguments)
    document = json.loads(text)
    chosen = next(one for one in document["policies"] if one["name"] == document["chosen"])
    assert status == 0 and chosen["gradient_error"] <= document["error"]
    assert bench(["cost", file, "--policy", str(out), "--dtype", "bfloat16", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)["tables"][0]["rows"][1]
    assert (counted["peak"], counted["kept"]) == (chosen["peak"], chosen["kept"])
    rates: Rates = GPUS["a100"].rates
    products = sum(flops / rates.of(dtype) for dtype, flops in counted["flops"].items())
    assert chosen["estimated_milliseconds"] == 1e3 * (counted["beside_products"] / rates.bandwidth + products)
