"""autograd.Functions as people write them: what they save and return, and how libraries write theirs."""

from typing import Any

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function


class SavesResult(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y) * y


class SavesResultFirst(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        ctx.save_for_backward(y, x, w, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, x, w, again = ctx.saved_tensors
        return grad * w + y - again, grad * x


class SavesTwoResults(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = x.exp(), x.sin()
        ctx.save_for_backward(y, z)
        return y, z

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        y, z = ctx.saved_tensors
        return first * y + second * z


class SetUp(Function):
    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> Tensor:
        return (x * factor).exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return grad * y * ctx.factor, None


class Decorated(Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).exp()
        ctx.save_for_backward(y, x, w)
        return y

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, x, w = ctx.saved_tensors
        inner = grad * y
        return inner @ w.t(), x.t() @ inner


class SavesDetached(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y.detach())
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


class SavesView(Function):
    """Saves a view of what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y.t(), y.view(-1))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        turned, flat = ctx.saved_tensors
        return grad * turned.t() + (grad.reshape(-1) * flat).view_as(grad)


class WritesInside(Function):
    """Computes in place inside, and saves what it wrote to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y.exp_().mul_(2)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        inner = grad.clone()
        return inner.mul_(y)


class WithIndices(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = x.sort(-1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(values, indices)
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        values, indices = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(-1, indices, grad * values)


class Asks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = x * w + b
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, y = ctx.saved_tensors
        of_x = grad * w if ctx.needs_input_grad[0] else None
        of_w = grad * x if ctx.needs_input_grad[1] else None
        return of_x, of_w, grad + 0 * y if ctx.needs_input_grad[2] else None


class Unmaterialized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        y, z = x.exp(), x.cos()
        ctx.save_for_backward(y, z)
        return y, z

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        y, z = ctx.saved_tensors
        total = None
        if first is not None:
            total = first * y
        if second is not None:
            total = second * z if total is None else total + second * z
        return total


class ReturnsInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * grad, None


class ReturnsItsInput(Function):
    """The input itself, and a result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        ctx.save_for_backward(y)
        return x, y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 2 * first + second * y


class ReturnsView(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.t() * 2


class ReturnsAliases(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        ctx.save_for_backward(y)
        return y, y.view(-1)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return first * y + 3 * second.view_as(y) * y


class ReturnsSaved(Function):
    """Its gradient is the saved result alone, as a straight-through estimator's may be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.cos()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y


class TakesMore(Function):
    """Arguments that are no tensors, some with defaults."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, names: tuple[str, ...], keep: bool = True, w: Any = None) -> Tensor:
        y = x.softmax(axis) if keep else x
        ctx.axis, ctx.names = axis, names
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (y,) = ctx.saved_tensors
        assert ctx.names == ("a", "b")
        inner = grad * y
        return inner - y * inner.sum(ctx.axis, keepdim=True), None, None, None, None


class CallsAnother(Function):
    """Its backward applies another Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return SavesResultFirst.apply(grad, y)


class Sparsemax(Function):
    """pytorch-tabnet's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int = -1) -> Tensor:
        ctx.dim = dim
        x = x - x.max(dim=dim, keepdim=True)[0]
        ordered = x.sort(descending=True, dim=dim)[0]
        sums = ordered.cumsum(dim) - 1
        rho = torch.arange(1, x.size(dim) + 1, dtype=x.dtype)
        support = rho * ordered > sums
        size = support.sum(dim=dim).unsqueeze(dim)
        tau = sums.gather(dim, size - 1) / size.to(x.dtype)
        y = torch.clamp(x - tau, min=0)
        ctx.save_for_backward(size, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        size, y = ctx.saved_tensors
        grad = grad.clone()
        grad[y == 0] = 0
        mean = grad.sum(dim=ctx.dim) / size.to(y.dtype).squeeze(ctx.dim)
        return torch.where(y != 0, grad - mean.unsqueeze(ctx.dim), grad), None


class Entmax15(Function):
    """entmax's, by sorting."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int = 0) -> Tensor:
        ctx.dim = dim
        x = (x - x.max(dim=dim, keepdim=True)[0]) / 2
        ordered = x.sort(dim=dim, descending=True)[0]
        rho = torch.arange(1, x.size(dim) + 1, dtype=x.dtype)
        mean, squares = ordered.cumsum(dim) / rho, (ordered**2).cumsum(dim) / rho
        delta = (1 - rho * (squares - mean**2)) / rho
        tau = mean - torch.clamp(delta, 0).sqrt()
        size = (tau <= ordered).sum(dim=dim).unsqueeze(dim)
        y = torch.clamp(x - tau.gather(dim, size - 1), min=0) ** 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        root = y.sqrt()
        inner = grad * root
        return inner - (inner.sum(ctx.dim) / root.sum(ctx.dim)).unsqueeze(ctx.dim) * root, None


class Reversible(Function):
    """revlib's: the backward recomputes the inputs from the results."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = a + (b * w).tanh()
        z = b + y.sin()
        ctx.save_for_backward(y, z, w)
        return y, z

    @staticmethod
    def backward(ctx: Any, of_y: Tensor, of_z: Tensor) -> tuple[Tensor, ...]:
        y, z, w = ctx.saved_tensors
        with torch.enable_grad():
            b = z - y.sin()
            inner = (b * w).tanh()
        of_y = of_y + of_z * y.cos()
        slope = of_y * (1 - inner * inner)
        return of_y, of_z + slope * w, slope * b


class Coupling(Function):
    """A layer of a normalizing flow: two results, of which the second is a sum over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = x * scale.exp()
        ctx.save_for_backward(y, scale)
        return y, scale.sum(-1)

    @staticmethod
    def backward(ctx: Any, of_y: Tensor, of_log: Tensor) -> tuple[Tensor, Tensor]:
        y, scale = ctx.saved_tensors
        return of_y * scale.exp(), of_y * y + of_log.unsqueeze(-1)


class Adjoint(Function):
    """torchdiffeq's pattern: Euler's steps forward, and backward from the final state alone."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, w: Tensor, steps: int) -> Tensor:
        with torch.no_grad():
            for _ in range(steps):
                state = state + 0.1 * (state * w).tanh()
        ctx.steps = steps
        ctx.save_for_backward(state, w)
        return state

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        state, w = ctx.saved_tensors
        of_w = torch.zeros_like(w)
        for _ in range(ctx.steps):
            inner = (state * w).tanh()
            state = state - 0.1 * inner
            slope = 0.1 * grad * (1 - inner * inner)
            of_w, grad = of_w + slope * state, grad + slope * w
        return grad, of_w, None
