"""Whole models on CUDA without a GPU: each op of a training step in the dtypes that eager autocast gives it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpus_transformers import MODELS as MORE
from simulated_ops import ops_beside_autocast
from support.machines.lacks import needs_compiler
from zoo import MODELS

from fxamp.tools.bench.cost.hooks import prepare_torch
from fxamp.tools.bench.process import Process

pytestmark = needs_compiler

#: Their grouped products refuse FakeTensors in float32, or they read values on the host.
_NOT_SIMULATED = {"mixtral", "mixtral-looped-experts", "transformers-olmoe", "wav2vec2", "deberta-v2"}
NAMES = [name for name in (*MODELS, *MORE) if name not in _NOT_SIMULATED]


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    here = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (here, here.parent))))
        process = Process(prepare_torch)
    with process:
        yield process


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_each_op_has_the_dtypes_of_eager_autocast(name: str, process: Process) -> None:
    expected, ours = process.ask(ops_beside_autocast, name)
    assert ours == expected
