"""The chunked loss that also returns the log-sums of its logits, compared with torch's own in float64."""

from collections.abc import Callable

import torch
from support.checks.exhaustive import each_once
from test_linear_cross_entropy import CLASSES, REDUCTIONS, ROWS, Largest, operands
from torch import Tensor
from torch.nn import functional as F

from fxamp.kernels.linear_cross_entropy import WITH_LOG_SUMS
from fxamp.kernels.loss_chunks import Gradients

TARGET = torch.arange(ROWS) % CLASSES


def chunked(x: Tensor, w: Tensor, b: Tensor, reduction: str, target: Tensor = TARGET) -> tuple[Tensor, Tensor]:
    form = REDUCTIONS.index(reduction), -100 if target.is_floating_point() else 5, 0.1
    loss, log_sums = WITH_LOG_SUMS(x, w, b, target, None, *form, x.dtype, 3, str(Gradients.IN_FORWARD))
    return loss, log_sums


def whole(x: Tensor, w: Tensor, b: Tensor, reduction: str, target: Tensor = TARGET) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, w, b)
    ignored = -100 if target.is_floating_point() else 5
    loss = F.cross_entropy(logits, target, reduction=reduction, ignore_index=ignored, label_smoothing=0.1)
    return loss, logits.logsumexp(-1)


#: What a program does with loss and log-sums.
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the mean of squares": lambda loss, z: loss.sum() + 0.1 * z.pow(2).mean(),
    "each row by a weight of its own": lambda loss, z: loss.sum() + (z * torch.arange(ROWS)).sum(),
    "the loss alone": lambda loss, _: loss.sum(),
    "the log-sums alone": lambda _, z: z.square().sum(),
}


@each_once("reduction, use, compiled", REDUCTIONS, USES, [False, True])
def test_loss_log_sums_and_gradients_are_torchs(reduction: str, use: str, compiled: bool) -> None:
    def outcome(loss: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
        tensors = operands(dtype)
        results = loss(*tensors, reduction)
        USES[use](*results).backward()
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        assert len(gradients) == len(tensors)
        return [*(result.detach() for result in results), *gradients]

    ours = torch.compile(chunked, backend="aot_eager", fullgraph=True) if compiled else chunked
    torch.testing.assert_close(
        outcome(ours, torch.float32), outcome(whole, torch.float64), rtol=1e-5, atol=1e-5, check_dtype=False
    )


def test_rows_that_do_not_count_have_a_gradient_by_their_log_sums_alone() -> None:
    """Where no label counts, the mean is nan; a mask over the loss is the program's own matter."""

    def outcome(loss: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor | None:
        x, w, b = operands(dtype)
        mean, log_sums = loss(x, w, b, "mean", torch.full((ROWS,), 5))
        (mean + log_sums.sum()).backward()
        return x.grad

    ours, exact = outcome(chunked, torch.float32), outcome(whole, torch.float64)
    assert ours is not None and exact is not None and exact.isfinite().all() and exact.any()
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_no_tensor_of_all_logits_exists() -> None:
    with Largest() as largest:
        USES["the mean of squares"](*chunked(*operands(torch.float32), "mean")).backward()
    assert 0 < largest.elements < ROWS * CLASSES


def test_a_target_that_learns_has_its_gradient() -> None:
    def outcome(loss: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor | None]:
        tensors = [*operands(dtype), torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(1)).to(dtype)]
        tensors[3].requires_grad_()
        mean, log_sums = loss(*tensors[:3], "mean", tensors[3].softmax(-1))
        (mean + 0.1 * log_sums.square().mean()).backward()
        return [tensor.grad for tensor in tensors]

    for ours, exact in zip(outcome(chunked, torch.float32), outcome(whole, torch.float64), strict=True):
        assert ours is not None and exact is not None
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
