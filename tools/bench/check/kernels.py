"""The generated kernels against torch's numbers: checks and unscaling, the scale's update, and optimizers' steps."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fxamp
from fxamp import kernels
from fxamp.policy import Policy, variant_names
from fxamp.tools.bench.check.check_line import Check, SkippedError, require
from fxamp.tools.bench.check.program import DRAWS
from fxamp.tools.bench.check.yardstick import relative_error, require_as_exact

SHAPES = ((1000, 37), (4099,), (3, 5), (1,), (64, 128))
_STEPS = 5
_Wrap = Callable[[torch.optim.Optimizer], object]
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "Adagrad": {"lr": 1e-2},
    "Adadelta": {"lr": 1.0},
    "Adamax": {"lr": 1e-2},
    "ASGD": {"lr": 1e-2},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-3, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 1e-2},
}


def kernel_checks(device: str) -> Iterator[Check]:
    """Yield a check for each kind of kernel."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield Check(f"check and unscale, {str(dtype).removeprefix('torch.')}", partial(_unscale, device, dtype))
    yield Check("update of the scale", partial(_update, device))
    for name in _OPTIMIZERS:
        yield Check(f"compiled step, {name}", partial(_step, device, name))
    yield Check("compiled step, AdamW, clipped", partial(_step, device, "AdamW", clip_norm=1.0))
    for policy in variant_names():
        if policy in (f"{device}-bfloat16-lean", f"{device}-bfloat16-leanest"):
            yield Check(f"compiled step, AdamW, {policy}", partial(_packed_step, device, policy))
    yield Check("more than 2**31 elements", partial(_huge, device))
    yield Check("parameters on the CPU and a GPU", partial(_offloaded, device))
    yield Check("a second GPU as home", partial(_second, device))


def _gradients(generator: torch.Generator, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return views into one tensor, as into one of DDP's buckets: some start at an odd offset, and are not aligned."""
    sizes = [math.prod(shape) for shape in SHAPES]
    bucket = torch.randn(sum(sizes), generator=generator).to(device, dtype)
    return [part.view(shape) for part, shape in zip(torch.split(bucket, sizes), SHAPES, strict=True)]


def _unscale(device: str, dtype: torch.dtype) -> str:
    """Equal to torch's op bit for bit; bfloat16, which that op lacks on CUDA, to float32 rounded once."""
    inverse = torch.tensor(1 / 1024, device=device)
    for bad in (None, float("inf"), float("nan")):
        ours = _gradients(torch.Generator().manual_seed(0), device, dtype)
        if bad is not None:
            ours[1][7] = bad
        theirs = [gradient.float() if dtype is torch.bfloat16 else gradient.clone() for gradient in ours]
        flag, torchs = (torch.zeros((), device=device) for _ in range(2))
        flags = torch.zeros(len(ours), dtype=torch.int32, device=device)
        kernels.check_unscale_(ours, inverse, flag, flags)
        torch._amp_foreach_non_finite_check_and_unscale_(theirs, torchs, inverse)
        require(torch.equal(flag, torchs), f"flag {flag.item()} for {bad}")
        require(flags.tolist() == [int(bad is not None and at == 1) for at in range(len(ours))], "other flags")
        same = all(torch.equal(a.nan_to_num(), b.to(dtype).nan_to_num()) for a, b in zip(ours, theirs, strict=True))
        require(same, "values differ from torch's")
    return "torch's flags and values, bit for bit"


def _update(device: str) -> str:
    pairs = [
        (torch.full((), 1024.0, device=device), torch.zeros((), dtype=torch.int32, device=device)) for _ in range(2)
    ]
    for step in range(12):
        flag = torch.tensor(float(step in (3, 4, 8)), device=device)
        kernels.update_scale_(*pairs[0], flag, kernels.ScaleRule(2.0, 0.5, 2))
        torch._amp_update_scale_(*pairs[1], flag, 2.0, 0.5, 2)
        require(all(torch.equal(a, b) for a, b in zip(*pairs, strict=True)), f"update {step} differs from torch's")
    return "12 updates equal torch's"


def _trained(
    device: str, name: str, seed: int, dtype: torch.dtype, wrap: _Wrap | None = None, clip: float | None = None
) -> dict[str, Tensor]:
    """Return weights after some steps on gradients that the seed gives; ``clip``: torch clips them first.

    ``wrap`` changes how the optimizer steps.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]
    optimizer = getattr(torch.optim, name)(parameters, **_OPTIMIZERS[name], foreach=False)
    if wrap is not None:
        wrap(optimizer)
    for _ in range(_STEPS):
        for parameter, gradient in zip(parameters, _gradients(generator, device, dtype), strict=True):
            parameter.grad = gradient
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return {str(at): parameter.detach().double().cpu() for at, parameter in enumerate(parameters)}


def _compared(
    device: str, name: str, wrap: _Wrap, yardstick: _Wrap | None = None, draws: int = DRAWS, clip: float | None = None
) -> str:
    """Compare the step by ``wrap`` with the ``yardstick``, by default torch's own, which clips to ``clip``."""
    errors: tuple[list[float], list[float]] = ([], [])
    for seed in range(draws):
        true = _trained("cpu", name, seed, torch.float64, clip=clip)
        errors[0].append(relative_error(_trained(device, name, seed, torch.float32, wrap), true))
        errors[1].append(relative_error(_trained(device, name, seed, torch.float32, yardstick, clip), true))
    return require_as_exact(*errors)


def _step(device: str, name: str, clip_norm: float | None = None) -> str:
    text = _compared(device, name, partial(fxamp.compile_optimizer, clip_norm=clip_norm), clip=clip_norm)
    return text.replace("the yardstick", "torch")


def _packed_step(device: str, policy: str) -> str:
    """With packed state, as exact as the same policy's step op by op."""
    loaded = Policy.load(policy)
    ours, op_by_op = (
        partial(fxamp.compile_optimizer, policy=loaded, lowering=lowering) for lowering in ("inductor", "aot_eager")
    )
    # Each draw traces both steps, which takes seconds.
    return _compared(device, "AdamW", ours, op_by_op, draws=2).replace("the yardstick", "the ops one by one")


def _huge(device: str) -> str:
    """An inf and a NaN after the 2**31st element are found, and the elements there are unscaled."""
    if device == "cpu":
        raise SkippedError("a CPU runs torch's own ops")
    count = 2**31 + 4096
    free, _ = torch.cuda.mem_get_info()
    if free < 5 * count:
        raise SkippedError(f"{free / 2**30:.0f} GiB of memory are free; {5 * count / 2**30:.0f} GiB are needed")
    gradient, inverse = torch.ones(count, dtype=torch.float16, device=device), torch.tensor(0.5, device=device)
    for last in (1.0, float("inf")):
        flag = torch.zeros((), device=device)
        gradient[-1] = last
        kernels.check_unscale_([gradient], inverse, flag)
        require(flag.item() == float(last != 1.0), f"flag {flag.item()} for a last element of {last}")
    require(bool((gradient[:-1] == 0.25).all()), "an element was not unscaled")
    return f"{count} elements of float16"


def _offloaded(device: str) -> str:
    """One scaler over CPU and GPU parameters: an overflow on either side skips both, though copies arrive late."""
    if device == "cpu":
        raise SkippedError("it needs a GPU")
    for bad in (None, "cpu", device):
        parameters = [nn.Parameter(torch.ones(64, device=where)) for where in ("cpu", device)]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler = fxamp.GradScaler(device, init_scale=1024.0)
        scaler.scale(torch.ones((), device=device))
        for parameter in parameters:
            inf = parameter.device.type == bad
            parameter.grad = torch.full_like(parameter, float("inf") if inf else 1024.0)
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        weight = 0.0 if bad is None else 1.0
        require(all(bool((p == weight).all()) for p in parameters), f"overflow on {bad}: weights are not {weight}")
    return "overflows on either side skip both"


def _second(device: str) -> str:
    if device == "cpu" or torch.cuda.device_count() < 2:
        raise SkippedError("it needs two GPUs")
    _unscale("cuda:1", torch.float32)
    _update("cuda:1")
    return _step("cuda:1", "AdamW")
