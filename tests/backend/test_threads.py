"""Other threads run compiled models while one thread captures a graph."""

import pytest
import torch
from support.oracles.beside_threads import Beside
from torch import Tensor

import fxamp


@pytest.fixture
def beside() -> Beside:
    """It may see that Dynamo compiles, which says so to all threads."""
    return Beside(by_torch=True)


@pytest.mark.parametrize("kernel", ["CompositeExplicitAutograd", "CompositeImplicitAutograd"])
@pytest.mark.parametrize("how", ["rewrite", "backend"])
def test_other_threads_do_not_notice_that_a_graph_is_captured(how: str, kernel: str, beside: Beside) -> None:
    """An op with an implicit kernel is decomposed too, to find ops with rules in it."""
    library = torch.library.Library("fxamp_threads", "DEF")

    def visited(x: Tensor) -> Tensor:
        if torch._guards.detect_fake_mode(x) is not None:
            beside.run()
        return x.sin()

    try:
        library.define("visited(Tensor x) -> Tensor")
        library.impl("visited", visited, kernel)

        def program(x: Tensor) -> Tensor:
            return torch.ops.fxamp_threads.visited(x) @ x

        x = torch.ones(2, 2)
        if how == "rewrite":
            run = fxamp.rewrite(program, (x,), policy="cpu-bfloat16")
        else:
            run = torch.compile(program, backend="fxamp", options={"policy": "cpu-bfloat16", "lowering": "eager"})
        assert torch.equal(run(x).float(), (x.sin().bfloat16() @ x.bfloat16()).float())
        assert not beside.errors and beside.runs > 1, "Dynamo alone ran it on fake tensors"
    finally:
        library._destroy()
