"""AOTAutograd's cache takes and refuses what fxamp expects."""

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp import torch_private as private


def quadrupled(x: Tensor) -> Tensor:
    return x * 4


def test_the_cache_takes_backwards_and_logs_what_it_does_not_take() -> None:
    gm = make_fx(lambda x: x * 2)(torch.ones(2))
    with inductor_config.patch(fx_graph_cache=True), functorch_config.patch(enable_autograd_cache=True):
        assert private.stores_backwards() and private.is_cacheable(gm)
        next(iter(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor))).target = quadrupled
        assert not private.is_cacheable(gm)
        with private.storing_backwards(name="mine"):
            assert private.of_this_process("name") == "mine"
            assert functorch_config.bundled_autograd_cache and functorch_config.force_non_lazy_backward_lowering
            assert not private.stores_backwards()
        with functorch_config.patch(enable_autograd_cache=False):
            assert not private.stores_backwards()
    assert isinstance(private.uncacheable("why"), BypassAOTAutogradCache)
