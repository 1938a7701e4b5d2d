"""Every executed op whose dtypes are not those of eager autocast, and why. All are wider: float32 for bfloat16.

Dynamo evaluates ``x.dtype`` while it traces in float32, so that ``.to(x.dtype)`` and ``dtype=x.dtype`` reach fxamp as a
cast to float32 that the user may well have written: it is kept. What crosses a graph break is float32 by design.
"""

from dataclasses import dataclass

_CACHE = "transformers' key-value cache starts as torch.tensor([], dtype=key_states.dtype): baked float32"
_BIAS = "the position bias is made with dtype=scores.dtype: baked float32"
_NORM = "the norm ends in weight * hidden.to(input_dtype): baked float32"
_LOOP = "Dynamo leaves the loop over experts out of the graphs: it runs in float32"
_SCAN = "the scan's operands are cast by .to(hidden_states.dtype) and made with dtype=: baked float32"
_MASK = "the shifted windows' mask is made with dtype=hidden_states.dtype: baked float32"
_BREAK = "its input crossed a graph break"
_SCALE = "the 0-dimensional scale is cast by .to(dtype=query_layer.dtype): baked float32"


@dataclass(frozen=True)
class Allowed:
    """``count`` calls, of forward and backward together, run as ``fxamp`` where eager autocast runs ``autocast``."""

    count: int
    autocast: str
    fxamp: str
    reason: str


#: By model; a model that is not named has none.
ALLOWED: dict[str, tuple[Allowed, ...]] = {
    "gpt2": (
        Allowed(2, "cat(bfloat16, bfloat16) -> bfloat16", "cat(float32, float32) -> float32", _CACHE),
        Allowed(2, "zeros() -> bfloat16", "zeros() -> float32", _CACHE),
    ),
    "gpt2-eager-attention": (
        Allowed(2, "cat(bfloat16, bfloat16) -> bfloat16", "cat(float32, float32) -> float32", _CACHE),
        Allowed(2, "zeros() -> bfloat16", "zeros() -> float32", _CACHE),
    ),
    "t5": (
        Allowed(4, "cat(bfloat16, bfloat16) -> bfloat16", "cat(float32, float32) -> float32", _CACHE),
        Allowed(4, "zeros() -> bfloat16", "zeros() -> float32", _CACHE),
        Allowed(1, "zeros() -> bfloat16", "zeros() -> float32", _BIAS),
    ),
    "qwen3": (
        Allowed(4, "mul.Tensor(float32, bfloat16) -> float32", "mul.Tensor(float32, float32) -> float32", _NORM),
    ),
    "mixtral-looped-experts": (
        Allowed(24, "mm(bfloat16, bfloat16) -> bfloat16", "mm(float32, float32) -> float32", _LOOP),
        Allowed(4, "silu(bfloat16) -> bfloat16", "silu(float32) -> float32", _LOOP),
        Allowed(12, "mul.Tensor(bfloat16, bfloat16) -> bfloat16", "mul.Tensor(float32, float32) -> float32", _LOOP),
        Allowed(4, "mul.Tensor(bfloat16, float32) -> float32", "mul.Tensor(float32, float32) -> float32", _LOOP),
        Allowed(4, "mul.Tensor(float32, bfloat16) -> float32", "mul.Tensor(float32, float32) -> float32", _LOOP),
        Allowed(
            4, "silu_backward(bfloat16, bfloat16) -> bfloat16", "silu_backward(float32, float32) -> float32", _LOOP
        ),
        Allowed(4, "cat(bfloat16, bfloat16) -> bfloat16", "cat(float32, float32) -> float32", _LOOP),
    ),
    "mamba": (
        Allowed(1, "add.Tensor(bfloat16, bfloat16) -> bfloat16", "add.Tensor(bfloat16, float32) -> float32", _SCAN),
        Allowed(1, "softplus(bfloat16) -> bfloat16", "softplus(float32) -> float32", _SCAN),
        Allowed(6, "mul.Tensor(float32, bfloat16) -> float32", "mul.Tensor(float32, float32) -> float32", _SCAN),
        Allowed(2, "mul.Tensor(bfloat16, float32) -> float32", "mul.Tensor(float32, float32) -> float32", _SCAN),
        Allowed(1, "zeros() -> bfloat16", "zeros() -> float32", _SCAN),
        Allowed(3, "add.Tensor(bfloat16, bfloat16) -> bfloat16", "add.Tensor(float32, float32) -> float32", _SCAN),
        Allowed(
            1,
            "softplus_backward(bfloat16, bfloat16) -> bfloat16",
            "softplus_backward(float32, float32) -> float32",
            _SCAN,
        ),
        Allowed(1, "sum.dim_IntList(bfloat16) -> bfloat16", "sum.dim_IntList(float32) -> float32", _SCAN),
    ),
    "swin": (
        Allowed(1, "sub.Tensor(bfloat16, bfloat16) -> bfloat16", "sub.Tensor(float32, float32) -> float32", _MASK),
        Allowed(1, "ne.Scalar(bfloat16) -> ", "ne.Scalar(float32) -> ", _MASK),
        Allowed(1, "eq.Scalar(bfloat16) -> ", "eq.Scalar(float32) -> ", _MASK),
        Allowed(2, "masked_fill.Scalar(bfloat16) -> bfloat16", "masked_fill.Scalar(float32) -> float32", _MASK),
        Allowed(1, "add.Tensor(float32, bfloat16) -> float32", "add.Tensor(float32, float32) -> float32", _MASK),
    ),
    "whisper": (
        Allowed(4, "cat(bfloat16, bfloat16) -> bfloat16", "cat(float32, float32) -> float32", _CACHE),
        Allowed(4, "zeros() -> bfloat16", "zeros() -> float32", _CACHE),
    ),
    "wav2vec2": (
        Allowed(
            1,
            "native_layer_norm(bfloat16, float32, float32) -> bfloat16, float32, float32",
            "native_layer_norm(float32, float32, float32) -> float32, float32, float32",
            _BREAK,
        ),
        Allowed(
            1,
            "native_layer_norm_backward(bfloat16, bfloat16, float32, float32, float32, float32)"
            " -> bfloat16, float32, float32",
            "native_layer_norm_backward(float32, float32, float32, float32, float32, float32)"
            " -> float32, float32, float32",
            _BREAK,
        ),
    ),
    "deberta-v2": (
        Allowed(6, "div.Tensor(bfloat16, bfloat16) -> bfloat16", "div.Tensor(bfloat16, float32) -> bfloat16", _SCALE),
        Allowed(1, "gather(bfloat16) -> bfloat16", "gather(float32) -> float32", _BREAK),
        Allowed(1, "new_zeros(bfloat16) -> bfloat16", "new_zeros(float32) -> float32", _BREAK),
        Allowed(1, "scatter_add(bfloat16, bfloat16) -> bfloat16", "scatter_add(float32, float32) -> float32", _BREAK),
    ),
}

#: By model, ops that transformers chooses differently when compiled; autocast has no entry for them: all take float32.
OTHER_KERNELS: dict[str, frozenset[str]] = {
    "mixtral": frozenset(
        {"_grouped_mm", "transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward"}
    ),
}

#: Models whose backward runs the same ops in another order: an explicit cast is a node, and autograd orders by nodes.
REORDERED_BACKWARD = frozenset({"mamba"})
