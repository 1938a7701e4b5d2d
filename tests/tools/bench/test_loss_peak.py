"""The buffers at the peak of a loss in chunks, by the count of Inductor's plan for a GPU."""

from pathlib import Path

import pytest
from support.checks.cost_counting import Counting

from fxamp.tools.bench.cost.workload import Way, Workload

CHUNK, CLASSES, WIDTH = 32, 4096, 16
SIZES = {"layers": 1, "width": WIDTH, "heads": 4, "vocabulary": CLASSES, "length": 32, "batch": 8}
POLICY = """extends = ["cuda-bfloat16"]

[[rule]]
id = "losses-in-chunks"
ops = ["cross_entropy_loss"]
chunks = {}
gradients = "{}"
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["bert-base", "gpt2-124m"])  # bert-base has a bias
@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_one_chunk_and_one_sum_stand_there(tmp_path: Path, counting: Counting, model: str, gradients: str) -> None:
    file = tmp_path / "chunks.toml"
    file.write_text(POLICY.format(CHUNK, gradients))
    peak = counting(Workload(model, "bfloat16", SIZES, loss_only=True), Way(str(file))).peak
    chunks = [buffer for buffer in peak.buffers if buffer.shape[-1:] == (CLASSES,) and len(buffer.shape) > 1]
    sums = [buffer for buffer in peak.buffers if buffer.op in ("fxamp.wide_product", "fxamp.add_product")]
    assert {buffer.shape for buffer in chunks} == {(CHUNK, CLASSES)}, "the peak is not at the loss"
    assert len(chunks) == 1, "the chunk's logits, or their gradient, which takes their place"
    assert [(buffer.dtype, buffer.shape) for buffer in sums] in ([], [("float32", (CLASSES, WIDTH))])
