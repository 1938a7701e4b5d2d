"""A chunk of the rows of a linear layer's cross entropy: its logits, losses and gradients, and sums over the chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from fxamp.kernels.chunk_sums import add_product, copy_after, wide_product
from fxamp.kernels.products.scaled_linear import input_gradient, output_product, weight_gradient
from fxamp.policy import RECIPES, Recipe

NONE, MEAN, SUM = range(3)
"""The reductions, as ATen numbers them (``at::Reduction``)."""


class Gradients(StrEnum):
    """Where the gradients of a chunk are computed."""

    IN_FORWARD = "forward"
    IN_BACKWARD = "backward"


@dataclass(frozen=True)
class LossForm:
    """The arguments of ``functional.cross_entropy``, and how the loss is chunked."""

    reduction: int
    ignore_index: int
    label_smoothing: float
    dtype: torch.dtype
    chunks: int
    gradients: Gradients
    recipe: Recipe | None


def counted_rows(target: Tensor, form: LossForm) -> Tensor:
    """bool ``[N]``: whether each row counts, that is, is not ignored."""
    if target.is_floating_point():
        return target.new_ones(target.shape[:1], dtype=torch.bool)
    return target.ne(form.ignore_index)


def cut_rows(rows: Tensor, chunks: int) -> list[Tensor]:
    """Return the rows in ``chunks`` views, whose sizes differ by one row at most."""
    count = rows.shape[0]
    ends = [count * i // chunks for i in range(chunks + 1)]
    return [rows[start:end] for start, end in pairwise(ends)]


def chunks_of(input: Tensor, target: Tensor, form: LossForm) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of each chunk, with their targets."""
    return zip(cut_rows(input, form.chunks), cut_rows(target, form.chunks), strict=True)


@dataclass(frozen=True)
class LossHead:
    """The linear layer, in the dtype of its products unless they are in fp8, and the class weights in float32."""

    weight: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    form: LossForm

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None, class_weight: Tensor | None, form: LossForm) -> "LossHead":
        lower = None if bias is None else bias.to(form.dtype)
        weight = weight.to(form.dtype) if form.recipe is None else weight
        return LossHead(weight, lower, None if class_weight is None else class_weight.float(), form)

    def gradient_factor(self) -> Tensor | None:
        """A power of two, 0-dim float32, that brings gradients of the logits into float16's range; None elsewhere.

        They are at most the largest class weight, so the products with ``weight``, in float16, stay below 2**15.
        """
        if self.form.dtype is not torch.float16 or self.form.recipe is not None:
            return None
        bound = torch.linalg.vector_norm(self.weight, torch.inf).float().clamp(min=1.0)
        if self.class_weight is not None:
            bound = bound * torch.linalg.vector_norm(self.class_weight, torch.inf)
        bits = (2.0**14 / bound.clamp(2.0**-100, 2.0**100)).view(torch.int32)
        power: Tensor = (bits & 0x7F800000).view(torch.float32)  # the exponent alone
        return power

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
class LossChunk:
    """Rows ``[n, K]`` in the products' dtype, their logits ``[n, C]`` in float32, and the log-sums of these."""

    head: LossHead
    rows: Tensor
    logits: Tensor
    log_sums: Tensor
    target: Tensor

    @staticmethod
    def of(head: LossHead, rows: Tensor, target: Tensor, earlier: list[Tensor]) -> "LossChunk":
        """``earlier``: the last tensors that the previous chunk computes from its logits; empty for the first chunk."""
        rows = rows.to(head.form.dtype)
        rows = copy_after(rows, earlier) if earlier else rows
        logits = head.logits(rows).float()
        return LossChunk(head, rows, logits, torch.logsumexp(logits, -1, keepdim=True), target)

    def losses(self) -> Tensor:
        """``[n]``: the losses of ``cross_entropy``, from sums over the logits that share a kernel with the log-sums."""
        shares = self._shares()
        chosen = torch.where(shares != 0, self.logits * shares, 0.0).sum(-1)
        counts = counted_rows(self.target, self.head.form)
        return torch.where(counts, self.log_sums.squeeze(1) * shares.sum(-1) - chosen, 0.0)

    def gradients(self, losses: Tensor | None = None) -> Tensor:
        """``[n, C]``: the gradient of the sum of :meth:`losses` for each logit, in float32.

        ``losses``: the result of :meth:`losses`, if it was computed. Then nothing reads the logits after this, so
        Inductor may write the gradients in 16 bits over logits in 16 bits.
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
            counts = counted_rows(self.target, form).unsqueeze(1)
            every = torch.arange(classes, device=self.target.device)
            index = every.gather(0, self.target.where(counts.squeeze(1), 0))  # raises for a target that is not a class
            shares = (every.eq(index.unsqueeze(1)) & counts).float()
        if form.label_smoothing:
            uniform = form.label_smoothing / classes
            shares = shares * (1 - form.label_smoothing) + uniform
            if not self.target.is_floating_point():
                shares = shares.where(counts, 0.0)
        return shares if weight is None else shares * weight


class GradientSums:
    """Sums the gradients of a head's operands over the chunks; ``needed``: which of the op's arguments need one.

    All sums are those of gradients times ``factor``.
    """

    def __init__(self, head: LossHead, needed: tuple[bool, ...], factor: Tensor | None = None) -> None:
        self._head = head
        self._needed = needed
        self._factor = factor
        self._rows: list[Tensor] = []
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def add(self, chunk: LossChunk, of_logits: Tensor) -> list[Tensor]:
        """Add those of one chunk, from its logits' float32 gradients, ``[n, C]``; return what reads it last."""
        scaled = of_logits if self._factor is None else of_logits * self._factor
        gradients = scaled.to(self._head.form.dtype)
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
