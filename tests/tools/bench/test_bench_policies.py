"""fxamp-bench policies: the figures that ``fxamp-policy list`` prints are those that it counts and measures."""

import json
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from support.checks.exhaustive import exhaustive

from fxamp.tools.bench.command import main
from fxamp.tools.bench.cost import policies as module
from fxamp.tools.bench.cost.count import Access, Buffer, Count, Kernel, Peak
from fxamp.tools.bench.cost.policies import Figures, figures
from fxamp.tools.bench.cost.workload import Way, Workload

FILE = Path(__file__).parents[3] / "policies/figures.json"
SHIPPED = json.loads(FILE.read_text())


def test_the_page_of_shipped_policies_has_the_figures_of_lean() -> None:
    table = " ".join(FILE.with_name("SHIPPED.md").read_text(encoding="utf-8").split())
    peak = table.partition("| lean: peak |")[2].partition("| `gpt2-124m` | ")[2].split(" | ")[1]
    assert float(peak) == SHIPPED["policies"]["cuda-bfloat16-lean"]["peak"]


def test_a_policy_without_figures_has_a_row_and_an_empty_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    assert main(["policies", "--policy", "mps-bfloat16", "--output", str(out)]) == 0
    assert "mps-bfloat16" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert written["policies"] == {"mps-bfloat16": {}}
    assert set(written) == set(SHIPPED) and written["about"] == SHIPPED["about"]


def test_ratios_have_three_digits() -> None:
    assert Figures(bytes=1.03849, kept=0.56, peak=0.4404).content() == {"bytes": 1.038, "kept": 0.56, "peak": 0.44}
    assert Figures().content() == {}


def test_one_process_counts_every_policy_and_torch_once_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {"float16": 100, "bfloat16": 200, "cuda-float16": 50, "cuda-bfloat16": 180, "cuda-bfloat16-fast": 150}
    processes: list[list[str]] = []

    def counts(requests: Iterable[tuple[Workload, Way]]) -> Iterator[Count]:
        processes.append([])
        for workload, way in requests:
            name = way.policy or workload.dtype
            processes[-1].append(name)
            size = moved[name] * workload.sizes["layers"]
            kernel = Kernel("forward", "triton", "add", (Access("a", size, "float32"),), ())
            yield Count(
                [kernel], kept=[Buffer(2 * size, "float32", (1,), "add", "", "")], graphs=1, peak=Peak(3 * size)
            )

    monkeypatch.setattr(module, "counts", counts)
    asked = ("cuda-bfloat16", "mps-float16", "cuda-float16", "cuda-bfloat16-fast")
    expected = [Figures(0.9, 0.9, 0.9), Figures(), Figures(0.5, 0.5, 0.5), Figures(0.75, 0.75, 0.75)]
    assert list(figures(asked)) == list(zip(asked, expected, strict=True))
    (names,) = processes
    assert sorted(names) == sorted([*moved] * 2)


@pytest.mark.parametrize("policy", exhaustive(("cuda-bfloat16-lean",), always=()))
def test_the_shipped_figures_are_what_is_counted(policy: str) -> None:
    here = {name: version(name).partition("+")[0] for name in SHIPPED["versions"]}
    if here != SHIPPED["versions"]:
        pytest.skip(f"the figures are for {SHIPPED['versions']}, and here are {here}")
    ((_, ratios),) = figures([policy])
    assert ratios.content() == SHIPPED["policies"][policy], "run fxamp-bench policies --output policies/figures.json"


@pytest.mark.parametrize("policy", exhaustive(("cpu-bfloat16",), always=()))
def test_the_policy_that_equals_autocast_has_its_error(policy: str) -> None:
    ((_, ratios),) = figures([policy])
    assert ratios.error == 1.0
