"""The cross entropy of a linear layer's results, a chunk of rows at a time: ``torch.ops.fxamp.linear_cross_entropy``.

``linear_cross_entropy_and_log_sums`` also returns each row's log-sum-exp of the logits, which a z-loss reads. They are
called log-sums here.

Both are differentiable, and made of ops that AOTAutograd traces. The logits of all rows never exist at once: those of
one chunk are freed before those of the next are computed, in the forward and in the backward. torch's own chunked
``functional.linear_cross_entropy`` cannot be compiled, and computes unscaled gradients.

1. Products run in the dtype that the policy gives them; log-sum-exp, losses and their sum in float32.
2. The gradient of a weight accumulates in float32 over the chunks and is rounded once. The pass add-in-place gives all
   chunks one buffer.
3. ``Gradients.IN_FORWARD``: the forward computes the gradients of the sum of all losses, which do not shrink as the
   batch grows, and the backward multiplies them by the gradient of the loss in float32. So float16 needs no loss scale
   in the forward; a power of two fits small probabilities, and class weights of any size, into its range. This takes no
   more products than without chunks, and saves one gradient for each operand.
4. ``Gradients.IN_BACKWARD``: the backward recomputes the logits of each chunk. This takes one more product, and saves
   only the operands. ``reduction="none"`` needs it, because each row has its own incoming gradient.
5. Each chunk depends on the sums of the previous one, so that a compiler cannot interleave them and hold the logits of
   both.
6. If targets or class weights need a gradient, which has as many elements as the logits, the loss is not chunked.
7. Ignored rows have a loss of zero, even if their logits are NaN, and gradients of zero, even if the mean divides by
   zero rows, as in torch.
8. In fp8 (``recipe``) each chunk calls :mod:`fxamp.kernels.products.scaled_linear` separately: a scale for the rows of
   one chunk is never coarser than one for all rows. The weight has the same scales in all chunks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fxamp.kernels.loss_chunks import (
    MEAN,
    NONE,
    Gradients,
    GradientSums,
    LossChunk,
    LossForm,
    LossHead,
    chunks_of,
    counted_rows,
    cut_rows,
)
from fxamp.kernels.products.scaled_linear import scaled_linear
from fxamp.policy import Recipe
from fxamp.torch_private import computed_again, kept_exactly, untraced

_OPERANDS = (
    "Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, int reduction, "
    "SymInt ignore_index, float label_smoothing, ScalarType dtype, int chunks, str gradients, str recipe=''"
)
_LIBRARY = torch.library.Library("fxamp", "FRAGMENT")  # type: ignore[no-untyped-call]
for _signature in (
    f"linear_cross_entropy({_OPERANDS}) -> Tensor",
    f"linear_cross_entropy_and_log_sums({_OPERANDS}) -> (Tensor, Tensor)",
):
    _LIBRARY.define(_signature)  # type: ignore[no-untyped-call]


@torch.library.impl(_LIBRARY, "linear_cross_entropy", "CompositeImplicitAutograd")
def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype,
    chunks: int,
    gradients: str,
    recipe: str = "",
) -> Tensor:
    """Return ``cross_entropy(linear(input, weight, bias), target, ...)`` in float32.

    Args:
        input: floating ``[N, K]``.
        weight: floating ``[C, K]``.
        bias: floating ``[C]``, or None.
        target: classes, an integer tensor ``[N]``; or probabilities, a floating one ``[N, C]``.
        class_weight: floating ``[C]``, or None.
        reduction: 0 for none, 1 for mean, 2 for sum: ATen's codes.
        ignore_index: rows with this class are ignored; for classes only.
        label_smoothing: from 0 to 1.
        dtype: what ``input``, ``weight`` and ``bias`` are cast to for the products.
        chunks: the number of chunks, whose sizes differ by rounding only.
        gradients: one of :class:`~fxamp.kernels.loss_chunks.Gradients`.
        recipe: one of :class:`fxamp.policy.Recipe` for products in fp8, else "".

    Returns:
        A number, or with reduction 0 ``[N]``. The gradients of all operands have the dtypes of these tensors. A second
        derivative raises, unless ``target`` or ``class_weight`` needs a gradient.
    """
    late = reduction == NONE or not torch.is_grad_enabled()
    place = Gradients.IN_BACKWARD if late else Gradients(gradients)
    form = LossForm(reduction, ignore_index, label_smoothing, dtype, chunks, place, Recipe(recipe) if recipe else None)
    return _loss_and_log_sums(input, weight, bias, target, class_weight, form)[0]


@torch.library.impl(_LIBRARY, "linear_cross_entropy_and_log_sums", "CompositeImplicitAutograd")
def linear_cross_entropy_and_log_sums(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype,
    chunks: int,
    gradients: str,
    recipe: str = "",
) -> tuple[Tensor, Tensor]:
    """Return what :func:`linear_cross_entropy` does, and the ``logsumexp`` of each row's logits: float32 ``[N]``.

    The backward computes the gradients, whatever ``gradients`` is: in the forward those of the log-sums are not known
    yet.
    """
    place = Gradients.IN_BACKWARD
    form = LossForm(reduction, ignore_index, label_smoothing, dtype, chunks, place, Recipe(recipe) if recipe else None)
    return _loss_and_log_sums(input, weight, bias, target, class_weight, form)


def _loss_and_log_sums(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, form: LossForm
) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (target.requires_grad or (class_weight is not None and class_weight.requires_grad)):
        return _whole(input, weight, bias, target, class_weight, form)
    losses: Tensor
    losses, log_sums = _Losses.apply(input, weight, bias, target, class_weight, form)  # type: ignore[no-untyped-call]
    return losses / _count(target, class_weight, form) if form.reduction == MEAN else losses, log_sums


def _whole(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, form: LossForm
) -> tuple[Tensor, Tensor]:
    """Return loss and log-sums, computed by torch's own ops without chunks: all operands can have gradients."""
    if form.recipe is None:
        operands = (None if tensor is None else tensor.to(form.dtype) for tensor in (input, weight, bias))
        logits = functional.linear(*operands).float()  # type: ignore[arg-type]
    else:
        logits = scaled_linear(input.to(form.dtype), weight, bias, form.recipe, form.dtype).float()
    loss = functional.cross_entropy(
        logits,
        target.float() if target.is_floating_point() else target,
        None if class_weight is None else class_weight.float(),
        ignore_index=form.ignore_index,
        reduction=("none", "mean", "sum")[form.reduction],
        label_smoothing=form.label_smoothing,
    )
    return loss, logits.logsumexp(-1)


def _count(target: Tensor, class_weight: Tensor | None, form: LossForm) -> Tensor:
    """The divisor of the mean: the number of rows that count, or the sum of their class weights."""
    counts = counted_rows(target, form)
    if class_weight is None or target.is_floating_point():
        return counts.sum()
    return class_weight.float()[target.where(counts, 0)].where(counts, 0.0).sum()


class _Losses(torch.autograd.Function):
    """Returns the sum of the losses of all rows, or each row's loss, and the log-sums ``[N]``.

    :class:`LossForm` says where the gradients are computed. If the forward computes them, the log-sums have none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        form: LossForm,
    ) -> tuple[Tensor, Tensor]:
        ctx.form = form
        ctx.set_materialize_grads(False)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (input, weight, bias)]
        head = LossHead.of(weight, bias, class_weight, form)
        early = form.gradients is Gradients.IN_FORWARD and any(ctx.needs_input_grad[:3])
        losses, log_sums = [], []
        with kept_exactly() if early else computed_again():
            factor = head.gradient_factor() if early else None
            sums = GradientSums(head, ctx.needs_input_grad, factor) if early else None
            earlier: list[Tensor] = []
            for rows, classes in chunks_of(input, target, form):
                chunk = LossChunk.of(head, rows, classes, earlier)
                losses.append(chunk.losses())
                log_sums.append(chunk.log_sums.squeeze(1))
                earlier = losses[-1:] if sums is None else sums.add(chunk, chunk.gradients(losses[-1]))
            operands = [input, weight, bias, target, class_weight]
            saved = operands if sums is None else [*sums.gradients(), counted_rows(target, form).any(), factor]
        ctx.save_for_backward(*saved)
        of_rows = torch.cat(log_sums)
        if early:
            ctx.mark_non_differentiable(of_rows)
        if form.reduction == NONE:
            return torch.cat(losses), of_rows
        return torch.stack([chunk_losses.sum() for chunk_losses in losses]).sum(), of_rows

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor | None, of_log_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        form: LossForm = ctx.form
        if gradient is None and of_log_sums is None:
            return (None,) * 6
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a loss that a policy's rule cuts into chunks has no second derivative (create_graph=True); accepted: "
                "a policy without chunks for this loss"
            )
        if form.gradients is Gradients.IN_FORWARD:
            *results, counts, factor = ctx.saved_tensors
            assert gradient is not None, "the log-sums have no gradient"
            scale = (gradient if factor is None else gradient / factor).where(counts, 0.0)
            results = [None if t is None else t.float() * scale for t in results]
        else:
            results = _computed_again(ctx, gradient, of_log_sums)
        gradients = [None if r is None else r.to(dtype) for r, dtype in zip(results, ctx.dtypes, strict=True)]
        return *gradients, None, None, None


def _computed_again(ctx: Any, gradient: Tensor | None, of_log_sums: Tensor | None) -> list[Tensor | None]:
    """Return the gradients, from recomputed logits; None stands for gradients of zero."""
    form: LossForm = ctx.form
    input, weight, bias, target, class_weight = ctx.saved_tensors
    sums = GradientSums(head := LossHead.of(weight, bias, class_weight, form), ctx.needs_input_grad)
    of_rows = None if gradient is None else gradient.where(counted_rows(target, form), 0.0)
    scales, log_scales = (
        [None] * form.chunks if each is None else cut_rows(each, form.chunks) for each in (of_rows, of_log_sums)
    )
    earlier: list[Tensor] = []
    for (rows, classes), scale, log_scale in zip(chunks_of(input, target, form), scales, log_scales, strict=True):
        chunk = LossChunk.of(head, rows, classes, earlier)
        earlier = sums.add(chunk, chunk.weighted_gradients(scale, log_scale))
    return sums.gradients()


CHUNKED = torch.ops.fxamp.linear_cross_entropy.default
WITH_LOG_SUMS = torch.ops.fxamp.linear_cross_entropy_and_log_sums.default
