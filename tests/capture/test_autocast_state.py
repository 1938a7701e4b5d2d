"""The state of torch.autocast in this thread, after what was traced or run in another state."""

import pytest
import torch
from support.checks.exhaustive import exhaustive
from torch import nn

import fxamp
from fxamp.capture.autocast_state import autocast_state


def product_after_a_changed_weight() -> bool:
    """Whether eager autocast sees that a weight changed, which it does if its cache is cleared at each region's end."""
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    results = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(linear(x))
        with torch.no_grad():
            linear.weight.copy_(torch.randn(4, 4))
    return not torch.equal(*results)


def test_a_region_that_an_exception_left_open_is_closed() -> None:
    linear, x = nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(ZeroDivisionError), autocast_state("cpu", False):
        torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, True)  # type: ignore[no-untyped-call]
        linear(x)
        raise ZeroDivisionError
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    with torch.no_grad():
        linear.weight.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x), linear.bias.bfloat16().expand(2, 4)), "the cast of the old weight is still cached"
    assert product_after_a_changed_weight()


def test_regions_around_stay_open() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with autocast_state("cpu", False):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
        assert torch.autocast_decrement_nesting() == 0
        torch.autocast_increment_nesting()


@pytest.mark.parametrize("lowering", exhaustive(["eager", "aot_eager"], always=["aot_eager"]))
def test_a_kept_call_that_fails_leaves_eager_autocast_as_it_was(lowering: str) -> None:
    """The call is left verbatim, in a region of its own; it fails while it is compiled, or when it runs."""

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: (row @ w).view(2, 2))(x)

    compiled = torch.compile(run, backend="fxamp", options={"policy": "auto", "lowering": lowering}, dynamic=True)
    for columns in (4, 3):
        with torch.autocast("cpu", torch.bfloat16):
            try:
                compiled(torch.randn(2, 4), torch.randn(4, columns))
            except RuntimeError:
                assert columns == 3
    assert product_after_a_changed_weight()
    assert fxamp.report(compiled).graphs
