"""A graph that AOTAutograd's cache returns trains in a new process as it did in the one that stored it."""

import json
import pickle
import random

import pytest
import stored_step
import torch
from support.machines.forked import printed_by
from support.machines.lacks import needs_compiler
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp.backend.stored_backward import StoredBackward
from fxamp.torch_private import storing_backwards

WAYS = (
    ("cpu-float16", True, "linear"),
    ("cpu-bfloat16", False, "linear"),
    ("cpu-float16-lean", True, "linear"),
    ("cpu-float16", True, "convolution"),
    ("cpu-float16-lean", False, "single"),
)


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("way", WAYS)
def test_a_new_process_trains_with_the_stored_graph(way: tuple[str, bool, str]) -> None:
    """The gradients are equal bit for bit, an unused result becomes used, and an overflow is found."""
    policy, scaled, net = way
    factor = random.SystemRandom().randrange(2**20) / 2**20 + 1  # no run before this one has compiled it
    first = stored_step.step(factor, policy, scaled, net)
    assert first["misses"]["aot_autograd"] == 1 and first["hits"]["aot_autograd"] == 0
    second = json.loads(printed_by(stored_step.__file__, str(factor), policy, str(scaled), net)[-1])
    assert second["misses"]["aot_autograd"] == 0 and second["hits"]["aot_autograd"] == 1
    assert second["kept"] == first["kept"] and bool(first["kept"]) is ("lean" in policy)
    if "lean" not in policy:  # Inductor compiles a backward that unpacks values again
        assert second["misses"]["inductor"] == 0
    assert repr(second["gradients"]) == repr(first["gradients"])
    assert second["scales"] == first["scales"] == ([1024.0, 512.0] if scaled else [1.0, 1.0])
    dtype = torch.bfloat16 if "bfloat16" in policy else torch.float16
    tolerance = 0.02 if "lean" in policy else 4 * torch.finfo(dtype).eps
    for actual, expected in zip(first["gradients"][0], stored_step.by_autocast(factor, dtype, net), strict=True):
        torch.testing.assert_close(torch.tensor(actual), expected, rtol=tolerance, atol=tolerance)


def graph() -> tuple[torch.fx.GraphModule, list[Tensor]]:
    with FakeTensorMode():
        inputs = [torch.ones(3, 4)]
    return make_fx(lambda x: x * 2, tracing_mode="fake")(*inputs), inputs


def test_a_graph_that_cannot_be_stored_is_left_out_of_the_cache() -> None:
    gm, inputs = graph()
    next(iter(gm.graph.nodes)).meta["lock"] = (item for item in ())
    stored = StoredBackward(gm, inputs, {}, lambda args: args)
    with pytest.raises(Exception, match="the backward graph cannot be stored") as refused:
        stored.prepare_for_serialization()
    assert type(refused.value).__name__ == "BypassAOTAutogradCache"


def test_a_loaded_graph_gets_the_settings_of_its_process() -> None:
    gm, inputs = graph()
    stored = StoredBackward(gm, inputs, {"cudagraphs": "theirs", "is_backward": True}, lambda args: args)
    stored.prepare_for_serialization()
    loaded = pickle.loads(pickle.dumps(stored))
    loads = []

    def load(*call: object) -> object:
        loads.append(call[2])
        return lambda args: args

    with storing_backwards(load=load):
        loaded.post_compile(inputs, None, {"cudagraphs": "ours", "is_backward": True})
    assert loads == [{"cudagraphs": "ours", "is_backward": True}] and loaded([1]) == [1]
