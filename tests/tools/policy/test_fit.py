"""fxamp-policy fit: what it writes loads and is what it counted, and its mistakes are one line."""

import json
from collections.abc import Callable
from pathlib import Path
from threading import Event
from xml.etree import ElementTree

import pytest
from policy_runs import run, written
from support.checks.commands import mistake

from fxamp.errors import OptionError
from fxamp.policy import Policy
from fxamp.policy.model.site import KEPT
from fxamp.tools.bench.command import main as bench
from fxamp.tools.bench.cost.count import Access, Buffer, Count, Kernel, Peak
from fxamp.tools.bench.cost.rates import Rates
from fxamp.tools.bench.process import ContenderFailed
from fxamp.tools.common.formatting import size
from fxamp.tools.policy.command import main
from fxamp.tools.policy.fit import counts
from fxamp.tools.policy.fit.counts import Counting, Form
from fxamp.tools.policy.fit.errors import Measuring
from fxamp.tools.policy.fit.gpus import GPUS

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


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts and errors that follow from the number of rules; the result says how many there were."""
    asked: list[Policy] = []

    def count(_: Counting, policy: Policy, form: Form) -> Count:
        asked.append(policy)
        rules = sum(rule.region == KEPT and rule.asks != "as-is" for rule in policy.rules)
        kernel = Kernel("forward", "triton", "add", (Access("a", 10_000_000 + 1000 * rules, "float32"),), ())
        peak = (form.batch or 128) * (4_000_000 - 100_000 * rules) // 128
        return Count([kernel], kept=[Buffer(peak, "float32", (1,), "add", "", "")], graphs=1, peak=Peak(peak))

    def errors(self: Measuring, policy: Policy) -> list[float]:
        asked.append(policy)
        smaller = "small" in self.work.file
        return [
            (2e-3 if smaller else 1e-3)
            * (1 + 0.01 * sum(rule.asks in ("int8", "float8_e4m3fn") for rule in policy.rules))
        ]

    monkeypatch.setattr(Counting, "_ask", count)
    monkeypatch.setattr(Measuring, "_errors", errors)
    return lambda: len(asked)


def model(tmp_path: Path, layers: int = 4) -> str:
    return written(tmp_path, MODEL.replace("{layers}", str(layers)))


def test_the_policy_loads_and_is_the_one_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], simulated: Callable[[], int]
) -> None:
    out = tmp_path / "mine.toml"
    status, text, _ = run(capsys, "fit", model(tmp_path), "--memory", "4MB", "--output", str(out), "--json")
    document = json.loads(text)
    chosen = next(one for one in document["policies"] if one["name"] == document["answer"])
    assert status == 0 and chosen["memory"] <= document["memory"] == 4e6
    policy, base = Policy.load(out), Policy.load("cuda-bfloat16")
    assert document["policy"] == out.read_text()
    rules = sum(rule.region == KEPT and rule.asks != "as-is" for rule in policy.rules)
    assert chosen["peak"] == 4_000_000 - 100_000 * rules and chosen["variants"]
    assert {rule.id for rule in base.rules} <= {rule.id for rule in policy.rules}


@pytest.mark.exhaustive
def test_another_file_beside_the_model_is_another_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], simulated: Callable[[], int]
) -> None:
    beside = tmp_path / "sizes.py"
    beside.write_text("LAYERS = 4\n")
    file = written(tmp_path, "from sizes import LAYERS\n" + MODEL.replace("{layers}", "LAYERS"))
    run(capsys, "fit", file)
    before = simulated()
    beside.write_text("LAYERS = 4  # the same, in other words\n")
    run(capsys, "fit", file)
    assert simulated() > before


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str], simulated: Callable[[], int]) -> None:
    out = tmp_path / "mine.toml"
    status, text, _ = run(capsys, "fit", model(tmp_path), "--memory", "1MB", "--output", str(out))
    assert status == 1 and not out.exists()
    document = json.loads(run(capsys, "fit", str(tmp_path / "model.py"), "--memory", "1MB", "--json")[1])
    least = min(one["memory"] for one in document["policies"] if one["gradient_error"] <= document["error"])
    assert f"within the other limits, needs {size(round(least - 1e6))} more" in text and "would save" in text


def test_the_largest_batch_is_counted_with_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], simulated: Callable[[], int]
) -> None:
    file = model(tmp_path)
    text = json.loads(run(capsys, "fit", file, "--memory", "8MB", "--prefer", "memory", "--batch", "--json")[1])
    chosen = next(one for one in text["policies"] if one["name"] == text["answer"])
    held, peak = chosen["memory"] - chosen["peak"], chosen["peak"]
    fits = next(size for size in range(128, 10_000) if held + (size + 1) * peak // 128 > 8e6)
    (note,) = [note for note in text["notes"] if "the largest batch" in note]
    assert f"the largest batch under {chosen['name']} is {fits}, which takes" in note
    assert note.endswith(f"{fits + 1} would take {size(round(held + (fits + 1) * peak // 128))}")
    written(tmp_path, "import torch\nmodel, inputs = torch.nn.Linear(2, 2), {}")


@pytest.mark.exhaustive
def test_the_chart_shows_every_policy_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], simulated: Callable[[], int]
) -> None:
    chart = tmp_path / "frontier.svg"
    arguments = ("fit", model(tmp_path), "--gpu", "a100", "--memory", "4MB", "--chart", str(chart))
    text = run(capsys, *arguments, "--json")[1]
    drawn = chart.read_text()
    assert run(capsys, *arguments)[1] == json.loads(text)["policy"] and chart.read_text() == drawn
    labels = {element.text for element in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")}
    chosen = json.loads(text)["answer"].removeprefix("cuda-bfloat16-")
    assert {
        "cuda-bfloat16",
        "lean",
        "leanest",
        "fast",
        "fast-norms",
        "limit",
        "shipped",
        "combination",
        chosen,
    } <= labels


def test_the_error_of_a_sister_is_taken_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], simulated: Callable[[], int]
) -> None:
    small = tmp_path / "small.py"
    small.write_text(MODEL.replace("{layers}", "3").replace("64", "32"))
    meta = 'with torch.device("meta"):\n    model = Net(6)'
    file = written(tmp_path, MODEL.replace("{layers}", "6").replace("model = Net(6)", meta))
    _, text, _ = run(capsys, "fit", file, "--sister", str(small), "--json")
    document = json.loads(text)
    assert document["policies"][0]["gradient_error"] == 2e-3
    assert "The error is that of small.py, not of model.py." in document["notes"]
    assert not any("fp8" in one["name"] for one in document["policies"])  # it is too small for products in fp8


@pytest.mark.exhaustive
def test_only_the_loss_leaves_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], simulated: Callable[[], int]
) -> None:
    out = tmp_path / "mine.toml"
    for budget in ("4MB", "5MB"):  # a policy of its own, and the base
        run(capsys, "fit", model(tmp_path), "--memory", budget, "--loss-only", "--output", str(out))
        assert [rule.id for rule in Policy.load(out).rules if rule.region == "results"] == ["loss-only"]


def test_ctrl_c_ends_the_count_that_is_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, killed = Event(), Event()

    class Slow:
        def __init__(self, *_: object) -> None:
            self.close = killed.set
            self.kill = killed.set

        def ask(self, *_: object) -> None:
            started.set()
            ended = killed.wait(5)
            raise ContenderFailed("its process ended" if ended else "nobody ended it")

    monkeypatch.setattr(counts, "Process", Slow)
    file = model(tmp_path)
    steps = []
    with pytest.raises(KeyboardInterrupt), Counting(file) as counting:
        steps += [counting.row(Policy.load("cuda-bfloat16"))]
        started.wait(5)
        raise KeyboardInterrupt
    with pytest.raises(OptionError, match="its process ended"):
        steps[0].result()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "h10"), "did you mean 'h100'?"),
        (("--memory", "40 apples"), "accepted: a number above 0 with B, KiB"),
        (("--memory", "9" * 400), "is not a size of memory; accepted: a number above 0"),
        (("--memory", "90GiB"), "--memory 90.0 GiB: the h100 has 80.0 GiB; accepted: up to that"),
        (("--base", "cpu-bfloat16"), "--base cpu-bfloat16: it is for cpu; accepted: a policy for cuda"),
        (("--base", "cuda-bfloat16-leam"), "did you mean 'cuda-bfloat16-lean"),
        (("--prefer", "speed"), "accepted: memory, time, error"),
        (("--output", "mine.json"), "accepted: 'mine.json.toml'"),
        (("--chart", "frontier.png"), "accepted: 'frontier.png.svg'"),
        (("--sister", "none.py"), "none.py"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_counted(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    simulated: Callable[[], int],
) -> None:
    assert words in mistake(main, ["fit", model(tmp_path), *arguments], capsys)
    assert simulated() == 0


def test_a_base_whose_step_launches_no_kernel_is_a_mistake(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    simulated: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counting, "_ask", lambda *_: Count())
    status, out, err = run(capsys, "fit", model(tmp_path))
    assert (status, out) == (2, "") and "a step launches no kernel on a GPU; accepted:" in err


def test_a_model_without_inputs_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, MODEL.replace("{layers}", "1").replace("inputs =", "batches ="))
    assert "it defines no inputs, which the count takes" in mistake(main, ["fit", file], capsys)


@pytest.mark.exhaustive
@pytest.mark.inductor
def test_two_depths_are_enough_for_the_whole_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = model(tmp_path, layers=8)
    status, text, _ = run(capsys, "fit", file, "--prefer", "memory", "--gpu", "a100", "--json")
    document = json.loads(text)
    assert status == 0 and "from 2 and 4 of its 8 layers" in document["notes"][-1]
    for name in ("cuda-bfloat16", "cuda-bfloat16-fast", "cuda-bfloat16-lean"):
        assert bench(["cost", file, "--policy", name, "--dtype", "bfloat16", "--json"]) == 0
        counted = json.loads(capsys.readouterr().out)["tables"][0]["rows"][1]
        (own,) = (one for one in document["policies"] if one["name"] == name)
        assert own["kept"] == counted["kept"] and own["peak"] == pytest.approx(counted["peak"], rel=0.02)


@pytest.mark.exhaustive
@pytest.mark.inductor
def test_the_counts_are_those_of_fxamp_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = model(tmp_path, layers=2), tmp_path / "mine.toml"
    arguments = ("--prefer", "memory", "--gpu", "a100", "--output", str(out), "--json")
    status, text, _ = run(capsys, "fit", file, *arguments)
    document = json.loads(text)
    chosen = next(one for one in document["policies"] if one["name"] == document["answer"])
    assert status == 0 and chosen["gradient_error"] <= document["error"]
    assert bench(["cost", file, "--policy", str(out), "--dtype", "bfloat16", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)["tables"][0]["rows"][1]
    assert (counted["peak"], counted["kept"]) == (chosen["peak"], chosen["kept"])
    rates: Rates = GPUS["a100"].rates
    products = sum(flops / rates.of(dtype) for dtype, flops in counted["flops"].items())
    assert chosen["estimated_milliseconds"] == 1e3 * (counted["beside_products"] / rates.bandwidth + products)
