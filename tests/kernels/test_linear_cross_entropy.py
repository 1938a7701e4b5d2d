"""The chunked loss and torch's own in float64: every form, whoever makes the gradients, eagerly and traced."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.checks.exhaustive import each_once, exhaustive
from support.machines.lacks import needs_gpu
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fxamp.kernels.linear_cross_entropy import CHUNKED
from fxamp.kernels.loss_chunks import Gradients

ROWS, WIDTH, CLASSES = 10, 6, 13
REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class Loss:
    """A form of the loss, and how its gradients are made."""

    reduction: str = "mean"
    label_smoothing: float = 0.0
    weighted: bool = False
    probabilities: bool = False
    gradients: Gradients = Gradients.IN_FORWARD

    def target(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        if self.probabilities:
            return torch.rand(ROWS, CLASSES, generator=generator, dtype=torch.float32).softmax(-1)
        target = torch.randint(0, CLASSES, (ROWS,), generator=generator)
        target[3] = 5  # what both ignore
        return target

    def settings(self, dtype: torch.dtype) -> dict[str, Any]:
        weight = torch.arange(1.0, CLASSES + 1, dtype=dtype) / CLASSES if self.weighted else None
        return {"weight": weight, "label_smoothing": self.label_smoothing}

    def chunked(self, x: Tensor, w: Tensor, b: Tensor | None, compiled: bool = False) -> Tensor:
        def loss(x: Tensor, w: Tensor, b: Tensor | None, target: Tensor, weight: Tensor | None) -> Tensor:
            return CHUNKED(x, w, b, target, weight, reduction, 5, smoothing, x.dtype, 3, gradients)

        reduction, smoothing, gradients = REDUCTIONS.index(self.reduction), self.label_smoothing, str(self.gradients)
        call = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
        result: Tensor = call(x, w, b, self.target(), self.settings(torch.float32)["weight"])
        return result

    def whole(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        target = self.target()
        target = target.double() if self.probabilities else target
        ignored = -100 if self.probabilities else 5
        return F.cross_entropy(
            F.linear(x, w, b), target, reduction=self.reduction, ignore_index=ignored, **self.settings(x.dtype)
        )


FORMS = [
    Loss(reduction, smoothing, weighted, probabilities, gradients)
    for reduction in REDUCTIONS
    for smoothing in (0.0, 0.1)
    for weighted in (False, True)
    for probabilities in (False, True)
    for gradients in Gradients
]


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def outcome(loss: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    result = loss(*tensors)
    (result * torch.arange(2.0, 2 + result.numel(), dtype=result.dtype).view_as(result)).sum().backward()
    return [result.detach(), *(tensor.grad for tensor in tensors if tensor.grad is not None)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", exhaustive(FORMS, always=[FORMS[0], FORMS[5], FORMS[14], FORMS[19], FORMS[30]]))
def test_every_form_is_that_of_torch(form: Loss, compiled: bool) -> None:
    chunked = outcome(lambda *tensors: form.chunked(*tensors, compiled), operands())
    torch.testing.assert_close(
        chunked, outcome(form.whole, operands(torch.float64)), rtol=1e-5, atol=1e-5, check_dtype=False
    )


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [FORMS[0], FORMS[9], FORMS[17], FORMS[25], FORMS[30]])
def test_the_default_dtype_changes_nothing(form: Loss, default: torch.dtype) -> None:
    tensors = operands(), operands()
    expected = outcome(form.chunked, tensors[0])
    torch.set_default_dtype(default)
    try:
        results = outcome(form.chunked, tensors[1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(results, expected)


def errors(gradients: Gradients, dtype: torch.dtype, repeats: int, scale: float) -> list[list[float]]:
    """Of loss and gradients, against float64: of the chunked loss, then of the whole one as autocast computes it."""

    def chunked(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = CHUNKED(x, w, None, target, None, 1, -100, 0.0, dtype, 3, str(gradients))
        return loss

    def whole(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, w)
        return F.cross_entropy(logits if x.dtype is torch.float64 else logits.float(), target)

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, 32, generator=generator).to(dtype) for size in (64, 50))
    target = torch.randint(0, 50, (64,), generator=generator).repeat(repeats)
    results = []
    for loss, computing in ((whole, torch.float64), (chunked, dtype), (whole, dtype)):
        rows, weight = (t.to(computing).requires_grad_() for t in (x.repeat(repeats, 1), w))
        result = loss(rows, weight, target) * scale
        result.backward()
        assert rows.grad is not None and weight.grad is not None
        results.append([result.detach().double(), rows.grad.double(), weight.grad.double()])
    exact, *others = results
    return [[(a - b).norm().item() for a, b in zip(other, exact, strict=True)] for other in others]


#: One rounding to 16 bits more than autocast, of as many.
ROUNDING = 2**0.5


@pytest.mark.parametrize("gradients", Gradients)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_error_is_that_of_autocast(dtype: torch.dtype, gradients: Gradients) -> None:
    for ours, autocast in zip(*errors(gradients, dtype, 1, 1.0), strict=True):
        assert ours <= ROUNDING * autocast + 1e-6


@pytest.mark.parametrize("gradients", Gradients)
def test_a_loss_scale_keeps_small_gradients_in_float16(gradients: Gradients) -> None:
    """The mean over many rows makes gradients of 1e-8, which need the scale; those made in the forward do not."""
    for ours, autocast in zip(*errors(gradients, torch.float16, 400, 2.0**16), strict=True):
        assert ours <= ROUNDING * autocast + 2.0**16 * 1e-6


def test_gradients_that_the_forward_makes_need_no_loss_scale() -> None:
    """Unscaled, autocast's float16 gradients underflow."""
    (_, rows, weight), (_, of_rows, of_weight) = errors(Gradients.IN_FORWARD, torch.float16, 400, 1.0)
    assert rows <= ROUNDING * of_rows and weight < 0.5 * of_weight


def row_errors(loss: str, weight: Tensor, class_weight: Tensor | None) -> list[Tensor]:
    """Of the gradients of rows and weight under a loss scale, relative to each row's norm in float64."""
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(32) * 2 % 16
    x = torch.randn(32, weight.shape[1], generator=generator).half()
    x[:, -1] = 6.0
    results = []
    for computing in (torch.float64, torch.float16):
        rows, head = (tensor.half().to(computing).requires_grad_() for tensor in (x, weight))
        shares = None if class_weight is None else class_weight.to(torch.promote_types(computing, torch.float32))
        if computing is torch.float64 or loss == "autocast":
            logits = F.linear(rows, head)
            total = F.cross_entropy(logits if computing is torch.float64 else logits.float(), target, shares)
        else:
            total = CHUNKED(rows, head, None, target, shares, 1, -100, 0.0, torch.float16, 4, loss)
        (total * 2.0**13).backward()
        assert rows.grad is not None and head.grad is not None
        results.append([rows.grad.double(), head.grad.double()])
    return [
        (ours - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-30) for exact, ours in zip(*results, strict=True)
    ]


def head_of(size: float, last: float) -> Tensor:
    """``[64, 17]``: classes from 16 on have logits ``6 * last`` lower."""
    weight = torch.randn(64, 17, generator=torch.Generator().manual_seed(1)) * size
    weight[:, -1] = 0.0
    weight[16:, -1] = -last
    return weight


FLOAT16 = {
    "plain": (head_of(0.5, 0.0), None),
    "unlikely classes": (head_of(0.5, 3.0), None),
    "rare classes": (head_of(0.5, 0.0), 1 / torch.logspace(4, 5, 64)),
    "tiny class weights": (head_of(0.5, 0.0), torch.linspace(1e-9, 2e-9, 64)),
    "large class weights": (head_of(0.5, 0.0), torch.linspace(5e4, 1e5, 64)),
    "large logits": (head_of(1000.0, 0.0), None),
}


@pytest.mark.parametrize("gradients", Gradients)
@pytest.mark.parametrize("case", FLOAT16)
def test_gradients_fit_the_range_of_float16(case: str, gradients: Gradients) -> None:
    both = row_errors(str(gradients), *FLOAT16[case]), row_errors("autocast", *FLOAT16[case])
    for ours, autocast in zip(*both, strict=True):
        assert ours.mean() <= ROUNDING * autocast.mean() + 1e-6


class Largest(TorchDispatchMode):
    """The largest number of elements that any op returns."""

    elements = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return result


@pytest.mark.parametrize("gradients", Gradients)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_tensor_of_all_logits_exists(reduction: str, gradients: Gradients) -> None:
    with Largest() as largest:
        outcome(Loss(reduction, 0.1, True, gradients=gradients).chunked, operands())
    assert largest.elements < ROWS * CLASSES
    with Largest() as whole:
        outcome(Loss(reduction).whole, operands())
    assert whole.elements >= ROWS * CLASSES


@pytest.mark.parametrize("gradients", Gradients)
@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_what_is_frozen_has_no_gradient(frozen: tuple[int, ...], gradients: Gradients) -> None:
    form, tensors = Loss(gradients=gradients), operands()
    for at in frozen:
        tensors[at].requires_grad_(False)
    loss = form.chunked(*tensors)
    assert loss.requires_grad == (len(frozen) < 3)
    if loss.requires_grad:
        loss.backward()
    reference = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    exact = form.whole(*reference)
    if exact.requires_grad:
        exact.backward()
    for ours, theirs in zip(tensors, reference, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


@each_once(
    "lowering, target", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)], [CLASSES, -1]
)
def test_what_is_no_class_raises(target: int, lowering: str | None) -> None:
    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return CHUNKED(x, w, None, target, None, 1, -100, 0.0, torch.float32, 2, "forward")

    x, w, _ = operands()
    call = loss if lowering is None else torch.compile(loss, backend=lowering)
    with pytest.raises(RuntimeError, match="out of bounds"):
        call(x, w, torch.full((ROWS,), target))


def test_a_second_derivative_raises() -> None:
    x, w, b = operands()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(Loss().chunked(x, w, b), x, create_graph=True)


def with_learned_operands(loss: Callable[..., Tensor], target: Tensor, dtype: torch.dtype) -> list[Tensor | None]:
    """The gradients of all operands, of which all but classes need one."""
    tensors = [*operands(dtype), target, (torch.arange(1.0, CLASSES + 1, dtype=dtype) / CLASSES).requires_grad_()]
    if target.is_floating_point():
        tensors[3] = target.to(dtype).requires_grad_()
    loss(*tensors).sum().backward()
    return [tensor.grad for tensor in tensors]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_targets_and_weights_that_need_a_gradient_have_one(reduction: str) -> None:
    def chunked(x: Tensor, w: Tensor, b: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        number = REDUCTIONS.index(reduction)
        loss: Tensor = CHUNKED(x, w, b, target, weights, number, -100, 0.1, torch.float32, 3, "forward")
        return loss

    def whole(x: Tensor, w: Tensor, b: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w, b), target, weights, reduction=reduction, label_smoothing=0.1)

    target = Loss(probabilities=True).target()
    exact = with_learned_operands(whole, target, torch.float64)
    for ours, gradient in zip(with_learned_operands(chunked, target, torch.float32), exact, strict=True):
        assert ours is not None and gradient is not None
        torch.testing.assert_close(ours.double(), gradient, rtol=1e-5, atol=1e-5)
    for loss in (chunked, whole):
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
            with_learned_operands(loss, Loss().target(), torch.float32)


def beside_torch(
    x: Tensor, w: Tensor, target: Tensor, form: Loss, seed: float = 1.0
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Loss and gradients of the chunked loss, and of torch's, in float32; backwards start with ``seed``."""

    def outcome(loss: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor | None]:
        leaves = [operand.detach().clone().requires_grad_() for operand in (x, w)]
        result = loss(*leaves)
        result.backward(torch.full_like(result, seed))
        return [result.detach(), *(leaf.grad for leaf in leaves)]

    reduction, smoothing, gradients = REDUCTIONS.index(form.reduction), form.label_smoothing, str(form.gradients)
    settings: dict[str, Any] = {"ignore_index": 5, "reduction": form.reduction, "label_smoothing": smoothing}
    return (
        outcome(lambda x, w: CHUNKED(x, w, None, target, None, reduction, 5, smoothing, x.dtype, 3, gradients)),
        outcome(lambda x, w: F.cross_entropy(F.linear(x, w), target, **settings)),
    )


@pytest.mark.parametrize("gradients", Gradients)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [0, ROWS])
def test_without_rows_that_count_gradients_are_zero_as_torch_has_it(
    rows: int, reduction: str, gradients: Gradients
) -> None:
    """Fine-tuning meets batches of which every label is ignored; the loss is nan, and the weights must not be."""
    x, w, _ = operands()
    form, seed = Loss(reduction, gradients=gradients), 1.0 if reduction == "mean" else float("inf")
    torch.testing.assert_close(*beside_torch(x[:rows], w, torch.full((rows,), 5), form, seed), equal_nan=True)


def test_without_gradients_none_are_made() -> None:
    class Products(TorchDispatchMode):
        weights = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.weights += op is torch.ops.fxamp.wide_product.default
            return op(*args, **(kwargs or {}))

    with Products() as products:
        with torch.no_grad():
            Loss().chunked(*operands())
        assert not products.weights
        Loss().chunked(*operands())
    assert products.weights


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
@pytest.mark.parametrize("units", [{}, {"avx512_bf16": True}], ids=["plain", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_products_add_up_in_float32_in_one_buffer(
    dtype: torch.dtype, units: dict[str, bool], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, size, generator=generator).to(device, dtype) for size in (64, 48))
    total = torch.ops.fxamp.wide_product(left, right)
    place, product = total.data_ptr(), total.clone()
    torch.ops.fxamp.add_product_(left, right, total)
    exact = left.double().t() @ right.double()
    assert total.data_ptr() == place and total.dtype is torch.float32
    torch.testing.assert_close(total.double(), 2 * exact, rtol=1e-5, atol=1e-4)
    assert torch.equal(total, torch.ops.fxamp.add_product(left, right, product))


@pytest.mark.parametrize("gradients", Gradients)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_that_do_not_count_may_be_no_numbers(reduction: str, gradients: Gradients) -> None:
    """Attention makes nan of rows that are all padding; their labels are ignored."""
    x, w, _ = operands()
    with torch.no_grad():
        x[3], x[7] = float("nan"), float("inf")
    target = torch.arange(ROWS).where(torch.arange(ROWS) % 4 != 3, 5)
    ours, theirs = beside_torch(x, w, target, Loss(reduction, 0.1, gradients=gradients))
    assert ours[0] is not None and ours[0].isfinite().all()
    torch.testing.assert_close(ours, theirs, equal_nan=True)
