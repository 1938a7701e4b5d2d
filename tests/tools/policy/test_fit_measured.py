"""fxamp-policy fit on small models, with true counts and errors, beside exhaustive search and other seeds."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from policy_runs import run, written

from fxamp.tools.policy.batches import load_work
from fxamp.tools.policy.fit import command
from fxamp.tools.policy.fit.choice import Limits
from fxamp.tools.policy.fit.decisions import Decision, Language
from fxamp.tools.policy.fit.errors import Measuring
from fxamp.tools.policy.fit.search import Search
from fxamp.tools.policy.fit.store import Store
from fxamp.tools.policy.patch import base_policy

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.up = nn.Linear(128, 512)
        self.down = nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(128, 1024)

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), target)

torch.manual_seed(0)
model = Net()
inputs = (torch.randn(256, 128), torch.randint(1024, (256,)))
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["cuda-bfloat16", "cuda-bfloat16-lean"])
def test_the_error_is_that_of_other_seeds(name: str, tmp_path: Path) -> None:
    file = written(tmp_path, MODEL)
    work = load_work(file, lambda _: None)
    policy = base_policy(name, work, lambda _: None, runs=True, emulate=True)[1]
    few, many = (
        Measuring(work, tuple(work.batches()), Store.of(file), draws).error(policy) for draws in (range(2), range(2, 8))
    )
    assert few == pytest.approx(many, rel=0.1)


@pytest.mark.exhaustive
@pytest.mark.inductor
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("decisions", "share", "prefer"), [(3, 0.5, "time"), (6, 0.5, "time"), (6, 0.5, "error")])
def test_what_is_chosen_is_what_exhaustive_search_chooses(
    decisions: int,
    share: float,
    prefer: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the policies with one of two options for each decision, each counted and measured."""
    names = {"kept values": 2, "computed again": 1, "norms": 1, "residual stream": 1}
    every = Language.decisions

    def some(self: Language, scopes: Any, model: Any) -> list[Decision]:
        own = [one for one in every(self, scopes, model) if one.name in names and len(one.options) > names[one.name]]
        own.sort(key=lambda one: [*names].index(one.name))
        return [Decision(one.name, one.scope, (one.options[0], one.options[names[one.name]])) for one in own][
            :decisions
        ]

    best: list[float] = []

    def whole(search: Search, limits: Limits, _: int) -> None:
        chosen = search.best(limits, prefer)
        for choice in product(range(2), repeat=len(search.decisions)):
            search.verified("exhaustive", choice)
        at = ("memory", "time", "error").index(prefer)
        best.extend(one.price.numbers[at] for one in (chosen, search.best(limits, prefer)) if one is not None)

    monkeypatch.setattr(Language, "decisions", some)
    monkeypatch.setattr(command, "_frontier", whole)
    monkeypatch.setattr(command, "_shipped", lambda _: ())
    arguments = ["fit", written(tmp_path, MODEL), "--gpu", "a100", "--prefer", prefer, "--error", "1.2", "--json"]
    base, *others = (one["memory"] for one in json.loads(run(capsys, *arguments)[1])["policies"])
    assert len(others) >= 2**decisions - 1
    best.clear()
    run(capsys, *arguments, "--memory", f"{int(share * base + (1 - share) * min(others))}B")
    chosen, optimum = best
    assert chosen == pytest.approx(optimum, rel=1e-9)
