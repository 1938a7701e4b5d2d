"""Two ranks whose gradients are summed in float16: what would underflow is refused by name, and the remedy works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.machines.ranks import on_ranks
from support.programs.small_models import Perceptron
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxamp
from fxamp.errors import UnscaledError

RANKS, SCALE, TINY = 2, 2.0**20, 2.0**-30


def hooked(hook: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(net: nn.Module) -> nn.Module:
        wrapper = DistributedDataParallel(net)
        if isinstance(hook, dist.BuiltinCommHookType):
            wrapper._register_builtin_comm_hook(hook)
        elif hook is not None:
            wrapper.register_comm_hook(None, hook)
        return wrapper

    return wrap


def sharded(**dtypes: torch.dtype) -> Callable[[nn.Module], nn.Module]:
    def wrap(net: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
        return net

    return wrap


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str | None]] = {
    "ddp": (hooked(None), None),
    "fp16_compress_hook": (hooked(default_hooks.fp16_compress_hook), "communication hook fp16_compress_hook"),
    "a wrapped hook": (
        hooked(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        "communication hook fp16_compress_wrapper",
    ),
    "a builtin hook": (hooked(dist.BuiltinCommHookType.FP16_COMPRESS), "communication hook .*FP16_COMPRESS"),
    "fsdp2": (sharded(), None),
    "fsdp2 in float16": (sharded(param_dtype=torch.float16), r"float16 parameter of shape .*MixedPrecisionPolicy"),
    "fsdp2 with sums in float16": (sharded(reduce_dtype=torch.float16), r"MixedPrecisionPolicy\(reduce_dtype"),
}


def gradients(net: nn.Module, scaler: Any, precision: bool) -> list[Tensor]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.autocast("cpu", torch.float16, enabled=precision):
        loss = net(x).float().square().mean() * TINY
    scaler.scale(loss).backward()
    scaler.unscale_(torch.optim.SGD(net.parameters(), lr=0.1))
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]


def run(name: str) -> dict[str, Any]:
    """Gradients of fxamp with the scaler in the options, of the remedy, and of torch; or the error."""
    wrap, _ = WRAPPERS[name]
    results: dict[str, Any] = {}
    for way in ("inside", "remedy", "torch"):
        torch._dynamo.reset()
        kind = torch.amp.GradScaler if way == "torch" else fxamp.GradScaler
        net, scaler = Perceptron(8, 8, 8), kind("cpu", init_scale=SCALE)
        if way != "torch":
            options = {"lowering": "aot_eager", "policy": "cpu-float16"}
            net.compile(backend="fxamp", options=options | ({"scaler": scaler} if way == "inside" else {}))
        try:
            results[way] = gradients(wrap(net), scaler, way == "torch")
        except UnscaledError as error:
            results[way] = str(error)
    return results


def work(mesh: DeviceMesh) -> dict[str, Any]:
    return {name: run(name) for name in WRAPPERS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(work, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WRAPPERS)
def test_what_underflows_is_refused_and_all_else_is_torchs(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        check(rank[name], WRAPPERS[name][1])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2 with sums in float16"])
def test_one_rank(name: str) -> None:
    check(run(name), WRAPPERS[name][1])


def check(results: dict[str, Any], message: str | None) -> None:
    assert all(gradient.any() for gradient in results["torch"])
    ways = ("remedy",) if message else ("inside", "remedy")
    for way in ways:
        for got, reference in zip(results[way], results["torch"], strict=True):
            assert (got - reference).norm() <= 8 * torch.finfo(torch.float16).eps * reference.norm()
    if message:
        with pytest.raises(UnscaledError, match=message):
            raise UnscaledError(results["inside"])
        assert "Or leave 'scaler' out of the options" in results["inside"]
