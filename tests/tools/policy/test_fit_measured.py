"""fxamp-policy fit on small models, with true counts and errors, beside exhaustive search and other seeds."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from exhaustive import exhaustive
from policy_runs import run, written

from fxamp.tools.policy.batches import load_work
from fxamp.tools.policy.fit import command
from fxamp.tools.policy.fit.choice import Limits
from fxamp.tools.policy.fit.decisions import Decision, Language
from fxamp.tools.policy.fit.errors import Measuring
from fxamp.tools.policy.fit.search import Candidate, Search
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
        self.embedding = nn.Embedding(1024, 128)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 1024)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())

torch.manual_seed(0)
model = Net()
inputs = (torch.randint(1024, (4, 64)),)
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", exhaustive(["cuda-bfloat16", "cuda-bfloat16-lean"], always=["cuda-bfloat16-lean"]))
def test_the_error_is_that_of_other_seeds(name: str, tmp_path: Path) -> None:
    file = written(tmp_path, MODEL)
    work = load_work(file, lambda _: None)
    policy = base_policy(name, work, lambda _: None, runs=True, emulate=True)[1]
    few, many = (
        Measuring(work, tuple(work.batches()), Store.of(file), draws).error(policy) for draws in (range(2), range(2, 8))
    )
    assert few == pytest.approx(many, rel=0.1)


#: Six decisions, each with one of its options.
DECISIONS = {
    ("norms and residual stream", "all of layers"): "both in 16 bits",
    ("norms and residual stream", "rest"): "norms in 16 bits",
    ("kept values", "all of layers"): "8 bits, or computed again",
    ("kept values", "rest"): "8 bits, or computed again",
    ("embeddings", "model"): "looked up again",
    ("optimizer's state", "model"): "8bit",
}

all_decisions = Language.decisions


def six(language: Language, scopes: Any, model: Any) -> list[Decision]:
    every = {(one.name, one.scope.name): one for one in all_decisions(language, scopes, model)}
    return [
        replace(every[key], options=(every[key].options[0], *(o for o in every[key].options if o.name == word)))
        for key, word in DECISIONS.items()
    ]


@pytest.mark.exhaustive
@pytest.mark.inductor  # which plans each of the 64 steps
@pytest.mark.timeout(1800)
def test_the_answer_is_that_of_exhaustive_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all 64 policies of six decisions, each counted and measured."""
    differences: list[list[str]] = []

    def whole(search: Search, *_: Any) -> None:
        own = next(iter(search.candidates.values()))
        for choice in product(range(2), repeat=len(search.decisions)):
            assert search.compose(choice) is not None
        differences.append([*differences_of(search, own)])
        assert len(search.candidates) == 2 ** len(DECISIONS)

    monkeypatch.setattr(Language, "decisions", six)
    monkeypatch.setattr(command, "_frontier", whole)
    monkeypatch.setattr(command, "_shipped", lambda _: ())
    status, _, err = run(capsys, "fit", written(tmp_path, MODEL), "--gpu", "a100", "--error", "1.2")
    assert (status, differences) == (0, [[]]), err


def differences_of(search: Search, own: Candidate) -> Iterator[str]:
    """Yield the limits within which a search that starts from the base does not end at the best of all candidates."""
    base = search.base
    least = min(one.price.memory for one in search.candidates.values())
    shares, errors = (0.1, 0.35, 0.6, 0.85), (1.1, 1.3, 3.0)
    for share, error, prefer in product(shares, errors, ("time", "memory", "error")):
        limits = Limits(least + share * (base.memory - least), base.square * error**2, 1.03 * base.milliseconds)
        fresh = replace(search, candidates={own.policy.digest: own})
        fresh.look(limits, prefer)
        answer, best = (where.best(limits, prefer) for where in (fresh, search))
        at, less = ("memory", "time", "error").index(prefer), 1e-3 if prefer == "memory" else 1e-9
        numbers = [math.inf if one is None else one.price.numbers[at] for one in (answer, best)]
        if not math.isclose(*numbers, rel_tol=less):
            yield f"{prefer} with {share} of the memory and {error} of the error: {numbers}"
