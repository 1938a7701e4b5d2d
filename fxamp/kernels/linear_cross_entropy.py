"""The cross entropy of a linear layer's results, a chunk of rows at a time: ``torch.ops.fxamp.linear_cross_entropy``.

``linear_cross_entropy_and_log_sums`` also returns each row's log-sum-exp of the logits, which a z-loss reads. This file
calls them log-sums.

Both are differentiable, and made of ops that AOTAutograd traces. The logits of all rows never exist at once: those of
one chunk are freed before those of the next are computed, in the forward and in the backward. torch's own chunked
``functional.linear_cross_entropy`` cannot be compiled, and computes unscaled gradients.

1. Products run in the dtype that the policy gives them; log-sum-exp, losses and their sum in float32.
2. The gradient of a weight accumulates in float32 over the chunks and is rounded once. The pass add-in-place gives all
   chunks one buffer.
3. ``Gradients.IN_FORWARD``: the forward computes the gradients of the sum of all losses, which do not shrink as the
   batch grows, and the backward multiplies them by the gradient of the loss in float32. So float16 needs no loss scale
   in the forward. This takes no more products than without chunks, and saves one gradient for each operand.
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

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fxamp.kernels.chunk_sums import add_product, copy_after, wide_product
from fxamp.kernels.products.scaled_linear import input_gradient, output_product, scaled_linear, weight_gradient
from fxamp.policy import RECIPES, Recipe
from fxamp.torch_private import computed_again, kept_exactly, untraced

NONE, MEAN, SUM = range(3)
"""The reductions, as ATen numbers them (``at::Reduction``)."""


class Gradients(StrEnum):
    """Where the gradients of a chunk are computed."""

    IN_FORWARD = "forward"
    IN_BACKWARD = "backward"


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


@dataclass(frozen=True)
class _Form:
    """The arguments of ``functional.cross_entropy``, and how the loss is chunked."""

    reduction: int
    ignore_index: int
    label_smoothing: float
    dtype: torch.dtype
    chunks: int
    gradients: Gradients
    recipe: Recipe | None


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
        reduction: 0 for none, 1 for mean, 2 for sum, as ATen has it.
        ignore_index: rows with this class are ignored; for classes only.
        label_smoothing: from 0 to 1.
        dtype: what ``input``, ``weight`` and ``bias`` are cast to for the products.
        chunks: the number of chunks, whose sizes differ by rounding only.
        gradients: one of :class:`Gradients`.
        recipe: one of :class:`fxamp.policy.Recipe` for products in fp8, else "".

    Returns:
        A number, or with reduction 0 ``[N]``. The gradients of all operands have the dtypes of these tensors. A second
        derivative raises, unless ``target`` or ``class_weight`` needs a gradient.
    """
    late = reduction == NONE or not torch.is_grad_enabled()
    place = Gradients.IN_BACKWARD if late else Gradients(gradients)
    form = _Form(reduction, ignore_index, label_smoothing, dtype, chunks, place, Recipe(recipe) if recipe else None)
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
    form = _Form(reduction, ignore_index, label_smoothing, dtype, chunks, place, Recipe(recipe) if recipe else None)
    return _loss_and_log_sums(input, weight, bias, target, class_weight, form)


def _loss_and_log_sums(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, form: _Form
) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (target.requires_grad or (class_weight is not None and class_weight.requires_grad)):
        return _whole(input, weight, bias, target, class_weight, form)
    losses: Tensor
    losses, log_sums = _Losses.apply(input, weight, bias, target, class_weight, form)  # type: ignore[no-untyped-call]
    return losses / _count(target, class_weight, form) if form.reduction == MEAN else losses, log_sums


def _whole(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, form: _Form
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


def _counting(target: Tensor, form: _Form) -> Tensor:
    """bool ``[N]``: whether each row counts, that is, is not ignored."""
    if target.is_floating_point():
        return target.new_ones(target.shape[:1], dtype=torch.bool)
    return target.ne(form.ignore_index)


def _count(target: Tensor, class_weight: Tensor | None, form: _Form) -> Tensor:
    """The divisor of the mean: the number of rows that count, or the sum of their class weights."""
    counts = _counting(target, form)
    if class_weight is None or target.is_floating_point():
        return counts.sum()
    return class_weight.float()[target.where(counts, 0)].where(counts, 0.0).sum()


class _Losses(torch.autograd.Function):
    """Returns the sum of the losses of all rows, or each row's loss, and the log-sums ``[N]``.

    :class:`_Form` says where the gradients are computed. If the forward computes them, the log-sums have none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        form: _Form,
    ) -> tuple[Tensor, Tensor]:
        ctx.form = form
        ctx.set_materialize_grads(False)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (input, weight, bias)]
        head = _Head.of(weight, bias, class_weight, form)
        early = form.gradients is Gradients.IN_FORWARD and any(ctx.needs_input_grad[:3])
        losses, log_sums = [], []
        with kept_exactly() if early else computed_again():
            sums = _Sums(head, ctx.needs_input_grad) if early else None
            earlier: list[Tensor] = []
            for rows, classes in _chunks(input, target, form):
                chunk = _Chunk.of(head, rows, classes, earlier)
                losses.append(chunk.losses())
                log_sums.append(chunk.log_sums.squeeze(1))
                earlier = losses[-1:] if sums is None else sums.add(chunk, chunk.gradients(losses[-1]))
            operands = [input, weight, bias, target, class_weight]
            saved = operands if sums is None else [*sums.gradients(), _counting(target, form).any()]
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
        form: _Form = ctx.form
        if gradient is None and of_log_sums is None:
            return (None,) * 6
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a loss that a policy's rule cuts into chunks has no second derivative (create_graph=True); accepted: "
                "a policy without chunks for this loss"
            )
        if form.gradients is Gradients.IN_FORWARD:
            *results, counts = ctx.saved_tensors
            assert gradient is not None, "the log-sums have no gradient"
            scale = gradient.where(counts, 0.0)
            results = [None if t is None else t.float() * scale for t in results]
        else:
            results = _computed_again(ctx, gradient, of_log_sums)
        gradients = [None if r is None else r.to(dtype) for r, dtype in zip(results, ctx.dtypes, strict=True)]
        return *gradients, None, None, None


def _computed_again(ctx: Any, gradient: Tensor | None, of_log_sums: Tensor | None) -> list[Tensor | None]:
    """Return the gradients, from recomputed logits; None stands for gradients of zero."""
    form: _Form = ctx.form
    input, weight, bias, target, class_weight = ctx.saved_tensors
    sums = _Sums(head := _Head.of(weight, bias, class_weight, form), ctx.needs_input_grad)
    of_rows = None if gradient is None else gradient.where(_counting(target, form), 0.0)
    scales, log_scales = (
        [None] * form.chunks if each is None else _cut(each, form.chunks) for each in (of_rows, of_log_sums)
    )
    earlier: list[Tensor] = []
    for (rows, classes), scale, log_scale in zip(_chunks(input, target, form), scales, log_scales, strict=True):
        chunk = _Chunk.of(head, rows, classes, earlier)
        earlier = sums.add(chunk, chunk.weighted_gradients(scale, log_scale))
    return sums.gradients()


def _cut(rows: Tensor, chunks: int) -> list[Tensor]:
    count = rows.shape[0]
    ends = [count * i // chunks for i in range(chunks + 1)]
    return [rows[start:end] for start, end in pairwise(ends)]


def _chunks(input: Tensor, target: Tensor, form: _Form) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(_cut(input, form.chunks), _cut(target, form.chunks), strict=True)


@dataclass(frozen=True)
class _Head:
    """The linear layer, in the dtype of its products unless they are in fp8, and the weights of classes in float32."""

    weight: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    form: _Form

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, form: _Form) -> "_Head":
        lower = None if bias is None else bias.to(form.dtype)
        weight = weight.to(form.dtype) if form.recipe is None else weight
        return _Head(weight, lower, None if class_weight is None else class_weight.float(), form)

    def logits(self, rows: Tensor) -> Tensor:
        """``[n, C]`` in the products' dtype."""
        if self.form.recipe is None:
            return functional.linear(rows, self.weight, self.bias)
        product = output_product(rows, self.weight, self.form.recipe, self.form.dtype)
        return product if self.bias is None else product + self.bias

    def input_gradient(self, gradients: Tensor) -> Tensor:
        """``[n, K]`` in the products' dtype, from the gradients of the logits."""
        if self.form.recipe is None:
            return gradients @ self.weight
        return input_gradient(gradients, self.weight, self.form.recipe, self.form.dtype)

    def weight_gradient(self, gradients: Tensor, rows: Tensor, total: Tensor | None) -> Tensor:
        """``[C, K]`` in float32, added to ``total``."""
        if self.form.recipe is None or RECIPES[self.form.recipe].weight_gradient is None:
            summed: Tensor = wide_product(gradients, rows) if total is None else add_product(gradients, rows, total)
            return summed
        product = weight_gradient(gradients, rows, self.form.recipe, self.form.dtype).float()
        return product if total is None else total + product


@dataclass(frozen=True)
class _Chunk:
    """Rows ``[n, K]`` in the products' dtype, their logits ``[n, C]`` in float32, and the log-sums of these."""

    head: _Head
    rows: Tensor
    logits: Tensor
    log_sums: Tensor
    target: Tensor

    @staticmethod
    def of(head: _Head, rows: Tensor, target: Tensor, earlier: list[Tensor]) -> "_Chunk":
        """``earlier``: the last tensors that the previous chunk computes from its logits; empty for the first chunk."""
        rows = rows.to(head.form.dtype)
        rows = copy_after(rows, earlier) if earlier else rows
        logits = head.logits(rows).float()
        return _Chunk(head, rows, logits, torch.logsumexp(logits, -1, keepdim=True), target)

    def losses(self) -> Tensor:
        """``[n]``: the losses of ``cross_entropy``, from sums over the logits that share a kernel with the log-sums."""
        shares = self._shares()
        chosen = torch.where(shares != 0, self.logits * shares, 0.0).sum(-1)
        counts = _counting(self.target, self.head.form)
        return torch.where(counts, self.log_sums.squeeze(1) * shares.sum(-1) - chosen, 0.0)

    def gradients(self, losses: Tensor | None = None) -> Tensor:
        """``[n, C]``: the gradient of the sum of :meth:`losses` for each logit, in float32.

        ``losses``: these, if they were computed: nothing reads the logits after this then, so Inductor may write the
        gradients in 16 bits over logits in 16 bits.
        """
        shares = self._shares()
        total = shares.sum(-1, keepdim=True)
        if losses is not None:  # a dependency, which changes nothing
            total = torch.where(losses.isnan().unsqueeze(1), total, total)
        return self._probabilities() * total - shares

    def weighted_gradients(self, scale: Tensor | None, log_scale: Tensor | None) -> Tensor:
        """``[n, C]``: the gradient of losses times ``scale`` plus log-sums times ``log_scale``, both ``[n]``."""
        losses = None if scale is None else self.gradients() * scale.unsqueeze(1)
        log_sums = None if log_scale is None else self._probabilities() * log_scale.unsqueeze(1)
        if losses is None or log_sums is None:
            result = log_sums if losses is None else losses
            assert result is not None, "neither losses nor log-sums have a gradient"
            return result
        return losses + log_sums

    def _probabilities(self) -> Tensor:
        return torch.exp(self.logits - self.log_sums)

    def _shares(self) -> Tensor:
        """``[n, C]``: the weight of each class in a row's loss."""
        form, weight = self.head.form, self.head.class_weight
        classes = self.logits.shape[1]
        if self.target.is_floating_point():
            shares = self.target.float()
        else:
            counts = _counting(self.target, form).unsqueeze(1)
            every = torch.arange(classes, device=self.target.device)
            index = every.gather(0, self.target.where(counts.squeeze(1), 0))  # raises for a target that is no class
            shares = torch.where(every.eq(index.unsqueeze(1)) & counts, 1.0, 0.0)
        if form.label_smoothing:
            uniform = form.label_smoothing / classes
            shares = shares * (1 - form.label_smoothing) + uniform
            if not self.target.is_floating_point():
                shares = shares.where(counts, 0.0)
        return shares if weight is None else shares * weight


class _Sums:
    """Sums the gradients of a head's operands over the chunks; ``needed``: which of the op's arguments need one."""

    def __init__(self, head: _Head, needed: tuple[bool, ...]) -> None:
        self._head = head
        self._needed = needed
        self._rows: list[Tensor] = []
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def add(self, chunk: _Chunk, of_logits: Tensor) -> list[Tensor]:
        """Add those of one chunk, from its logits' float32 gradients, ``[n, C]``; return what reads it last."""
        gradients = of_logits.to(self._head.form.dtype)
        of_input, of_weight, of_bias = self._needed[:3]
        if of_input:
            self._rows.append(self._head.input_gradient(gradients))
        if of_weight:
            self._weight = self._head.weight_gradient(gradients, chunk.rows, self._weight)
        if of_bias:
            total = gradients.float().sum(0)
            self._bias = total if self._bias is None else self._bias + total
        sums = [total for total in (self._weight, self._bias) if total is not None]
        return sums or self._rows[-1:]

    def gradients(self) -> list[Tensor | None]:
        """Return those of the input in the products' dtype, of weight and bias in float32; None if not needed."""
        return [torch.cat(self._rows) if self._rows else None, self._weight, self._bias]
