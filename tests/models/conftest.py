"""Each model once a session: its references, and its runs through fxamp, shared by all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from model_runs import Baseline, Run, baseline, compiled
from support.checks.exhaustive import exhaustive
from zoo import MODELS

#: Models that run by default: attention and convolution; the gate runs the others.
ALWAYS = ("bert", "resnet")

#: Warnings of other people's code, which the models meet whatever the backend.
_FOREIGN_WARNINGS = (
    # transformers caches its look-ups of installed packages; Dynamo says that it traces through the cache.
    "ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function:UserWarning",
    # torch's fused RMS norm says that it does not run where autocast leaves the weight in float32.
    "ignore:Mismatch dtype between input and weight:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the foreign warnings pass in this folder's tests only."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for entry in _FOREIGN_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(entry))


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    """No advice from transformers about kernels that are not installed; one thread, as the tensors are tiny."""
    level, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    yield
    transformers.logging.set_verbosity(level)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> None:
    """Tests of one model share what was compiled for it."""


@pytest.fixture(scope="session", params=exhaustive(MODELS, always=ALWAYS))
def base(request: pytest.FixtureRequest) -> Baseline:
    """A model with its runs in float64 and under eager autocast."""
    return baseline(request.param)


@pytest.fixture(scope="session")
def eager(base: Baseline) -> list[Run]:
    """The model through fxamp, the rewritten graphs run as they are."""
    return compiled(base, "eager")


@pytest.fixture(scope="session")
def aot_eager(base: Baseline) -> list[Run]:
    """The model through fxamp and AOTAutograd."""
    if MODELS[base.name].variant:
        pytest.skip("a variant of a model that is compiled so")
    return compiled(base, "aot_eager")
