"""What autocast lowers: matrix products, convolutions, attention."""

import torch
from programs.draft import Draft, Unfit
from programs.statements.registry import statement


@statement(weight=7)
def linear(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 1)
    out = d.pick((8, 4))
    weight = d.weight(out, d.shape(x)[-1])
    bias = f", {d.weight(out)}" if d.chance() else ""
    d.let(f"F.linear({d.lowered(x)}, {weight}{bias})")


_OTHER_DTYPES = (
    "F.linear({x}.to({w}.dtype), {w})", "F.linear({x}, {w}.float())", "{x} * {w}[0]", "{x} @ {w}.t()",
    "F.layer_norm({x}.to({w}.dtype), ({size},), {w}[0], {w}[1])", "F.rms_norm({x}.float(), ({size},), {w}[0].float())",
    "F.linear({x}.to({w}.dtype), {w}) + F.linear({x}, {w}.float())", "{x} + {w}[:, 0].sum()",
)  # fmt: skip


@statement()
def parameter_of_another_dtype(d: Draft) -> None:
    """A weight that is neither float32 nor float16, whose gradients torch's scaler does not take."""
    x = d.value(lambda v: v.dim() >= 1 and v.shape[-1] > 1)
    size = d.shape(x)[-1]
    w = d.parameter(8, size, dtype=d.pick((torch.bfloat16, torch.float64)))
    d.let(d.pick(_OTHER_DTYPES).format(x=x, w=w, size=size))


@statement(weight=2)
def two_layers(d: Draft) -> None:
    """Two layers that read one activation in float32, whose gradients are added up."""
    _two_layers(d, d.let(f"{d.value(lambda v: v.dim() >= 1)}.float() * 1.7"))


@statement(weight=2)
def layers_of_parts(d: Draft) -> None:
    """The same, of what has a gradient because a part of it was written to."""
    source = d.value(lambda v: v.dim() >= 1)
    x = d.let(f"torch.zeros({source}.shape)")
    d.do(f"{x}[0].add_({source}[0].float() * 1.7)")
    _two_layers(d, x)


def _two_layers(d: Draft, x: str) -> None:
    """Of two weights: the sum of two equal gradients is exact in 16 bits too."""
    layers = [d.let(f"F.linear({d.lowered(x)}, {d.weight(size, d.shape(x)[-1])})") for size in (8, 4)]
    d.let(f"torch.cat([{', '.join(layers)}], -1)")


_PRODUCTS = (
    "{} @ {}", "torch.mm({}, {})", "torch.addmm({0}, {0}, {1})", "{}.matmul({})", "torch.addmm({1}[0], {0}, {1})",
)  # fmt: skip
_COMPOSITES = (
    "torch.einsum('ij,jk->ik', {}, {})", "torch.tensordot({}, {}, 1)", "torch.linalg.multi_dot([{}, {}])",
    "torch.einsum('ij,jk', {}, {})", "torch.einsum('ij,jk->ki', {}, {})", "torch.einsum('...j,jk->...k', {}, {})",
    "torch.mv({}, {}[:, 0])", "torch.chain_matmul({}, {})", "torch.inner({}, {}.t())", "torch.kron({}, {})[:4]",
)  # fmt: skip


@statement(weight=6)
def product(d: Draft) -> None:
    d.let(d.pick(_PRODUCTS).format(*map(d.lowered, _factors(d))))


@statement()
def composite_product(d: Draft) -> None:
    """Autocast acts inside of these, where the oracle cannot mark what it casts."""
    if d.place.body or d.place.region:
        raise Unfit
    d.let(d.pick(_COMPOSITES).format(*_factors(d)))


def _factors(d: Draft) -> tuple[str, str]:
    x = d.ranked(2)
    width = d.shape(x)[-1]
    if d.chance():
        return x, d.parameter(width, d.pick((8, 4)))
    y = d.value(lambda v: v.dim() == 2 and width in v.shape)
    return x, y if d.shape(y)[0] == width else f"{y}.t()"


_BATCHED = ("torch.bmm({}, {})", "{} @ {}", "torch.baddbmm({0} @ {1}, {0}, {1})", "torch.matmul({}, {})")


@statement(weight=4)
def batched_product(d: Draft) -> None:
    x = d.ranked(3)
    batch, rows, columns = d.shape(x)
    y = d.value(lambda v: v.dim() == 3 and tuple(v.shape) in ((batch, columns, rows), (batch, rows, columns)))
    other = d.lowered(y) if d.shape(y)[1] == columns else f"{y}.transpose(1, 2)"
    d.let(d.pick(_BATCHED).format(d.lowered(x), other))


@statement(weight=4)
def attention(d: Draft) -> None:
    q = d.ranked(3, 4)
    k, v = d.alike(q), d.alike(q)
    causal = ", is_causal=True" if d.chance() else ""
    operands = ", ".join(map(d.lowered, (q, k, v)))
    d.let(f"F.scaled_dot_product_attention({operands}{causal})")


@statement()
def masked_attention(d: Draft) -> None:
    """With a mask of truth values or of numbers, or with a scale."""
    q = d.ranked(3)
    k, v, rows = d.alike(q), d.alike(q), d.shape(q)[1]
    ones = f"torch.ones({rows}, {rows}, dtype=torch.bool).tril()"
    number = d.let(f"{q}.detach() @ {q}.detach().transpose(-1, -2)")
    form = d.pick((f"attn_mask={ones}", f"attn_mask=({number} * 0.1).to({q}.dtype)", "scale=0.3"))
    operands = ", ".join(map(d.lowered, (q, k, v)))
    if ".dtype" in form and not d.setting.ambient:
        form = f"attn_mask={ones}[None]"
    d.let(f"F.scaled_dot_product_attention({operands}, {form})")


_COMPUTED_WEIGHTS = (
    "{w}.t()", "{w} * 0.5", "{w} / {w}.norm(dim=1, keepdim=True)", "{w} + {w}.t()", "{w}.detach()", "{w}.clone()",
    "{w}[:, :]", "torch.where({w} > 0, {w}, 0.0)", "{w}.softmax(0)", "{w}.half().float()", "{w}.flip(0)",
)  # fmt: skip


@statement(weight=2)
def computed_weight(d: Draft) -> None:
    """A layer whose weight is computed from a parameter: normed, masked, symmetric; perhaps beside one with itself."""
    x = d.value(lambda v: v.dim() >= 1 and v.shape[-1] in (4, 8))
    parameter = d.parameter(d.shape(x)[-1], d.shape(x)[-1])
    weight = d.let(d.pick(_COMPUTED_WEIGHTS).format(w=parameter))
    d.let(f"F.linear({d.lowered(x)}, {d.lowered(weight)})")
    if d.chance():
        d.let(f"F.linear({d.lowered(x)}, {d.lowered(parameter)})")


_OWN_DTYPES = ("F.linear({x}.{to}(), {w}.{to}())", "F.linear({x}.{to}(), {w}.{to}()).float() + F.linear({x}, {w})")


@statement()
def weight_in_its_own_dtype(d: Draft) -> None:
    """Under two dtypes at once, perhaps. The user's casts are no casts of autocast's."""
    if d.place.body or d.place.region:
        raise Unfit
    x = d.value(lambda v: v.dim() >= 1 and v.shape[-1] in (4, 8))
    weight = d.parameter(8, d.shape(x)[-1])
    d.let(d.pick(_OWN_DTYPES).format(x=x, w=weight, to=d.pick(("half", "bfloat16", "double"))))


@statement(weight=2)
def convolution(d: Draft) -> None:
    x = d.ranked(3)
    _, channels, _ = d.shape(x)
    out = d.pick((4, 2))
    bias = f", {d.weight(out)}" if d.chance() else ""
    d.let(f"F.conv1d({d.lowered(x)}, {d.weight(out, channels, 3)}{bias}, padding=1)")


_CONVOLUTIONS = (
    ("F.conv1d({x}, {w}, stride=2, padding=1)", (4, 1, 3)), ("F.conv1d({x}, {w}, groups={c}, padding=1)", (0, 1, 3)),
    ("F.conv1d({x}, {w}, dilation=2, padding=2)", (4, 1, 3)), ("F.conv_transpose1d({x}, {w}, stride=2)", (1, 4, 3)),
    ("F.conv1d({x}, {w}, padding='same')", (4, 1, 3)),
)  # fmt: skip


@statement()
def convolution_forms(d: Draft) -> None:
    """Strided, depthwise, dilated, transposed."""
    x = d.ranked(3)
    channels = d.shape(x)[1]
    code, (out, into, size) = d.pick(_CONVOLUTIONS)
    shape = (out or channels, into if "groups" in code else into * channels, size)
    if "transpose" in code:
        shape = (channels, 4, size)
    d.let(code.format(x=d.lowered(x), w=d.weight(*shape), c=channels))


@statement()
def convolution_2d(d: Draft) -> None:
    x = d.ranked(3)
    _, rows, columns = d.shape(x)
    weight = d.weight(rows, rows, 1, 1)
    d.let(f"F.conv2d({x}.view(1, {rows}, -1, {columns}), {weight}).squeeze(0)")


@statement()
def custom_op(d: Draft) -> None:
    """A library says what autocast does; it has no cache of casts."""
    x = d.ranked(2)
    d.let(f"torch.ops.programs.{d.pick(('low', 'wide', 'half'))}({x}, {d.parameter(d.shape(x)[-1], 8)})")


@statement()
def plain_custom_op(d: Draft) -> None:
    """A library's op that autocast does not know: one with two results, or one that writes to its first operand."""
    x = d.value(lambda v: v.dim() >= 1)
    if d.chance():
        d.let_several(f"torch.ops.programs.halved({x})", 2)
    else:
        total = d.let(f"torch.zeros({x}.shape)")
        d.do(f"torch.ops.programs.accumulate({total}, {x}.detach())")
