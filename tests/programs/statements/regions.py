"""What Dynamo puts into graphs that is no ATen op: ``.data``, inference mode, torch.func; and sizes as tensors."""

from dataclasses import replace

from programs.draft import Draft, Unfit
from programs.statements.registry import statement

_READS = (
    "{}.data", "{}.data * 2", "{0} + ({0}.round() - {0}).data", "{0} / ({0}.data.abs().amax() + 1)",
    "{}.data[0]", "{}.data.t() if {}.dim() == 2 else {}.data", "{0} * {0}.data",
)  # fmt: skip


@statement()
def data_read(d: Draft) -> None:
    d.let(d.pick(_READS).replace("{0}", "{}").replace("{}", d.value(lambda v: v.dim() >= 1)))


_WRITES = (
    "{0}.data[1:].copy_({1}[1:])", "{0}.data.mul_(2)", "{0}.data.copy_({1})", "{0}.data[0] = 3",
    "{0}.data.view(-1)[0] += 5", "{0}.data.clamp_(-0.5, 0.5)", "{0}.data.add_({1}.data)",
)  # fmt: skip


@statement()
def data_write(d: Draft) -> None:
    """To a fresh value: what is kept for the backward must not change unseen."""
    x = d.value(lambda v: v.dim() >= 2)
    fresh = d.let(d.pick(("torch.zeros_like({})", "{}.detach().clone()", "{}.new_ones({}.shape)")).replace("{}", x))
    d.do(d.pick(_WRITES).format(fresh, d.alike(fresh)))


_BUFFER = (
    "{0}.data.lerp_({1}.data[0].float(), 0.1)", "{0}.data.mul_(0.9)", "{0}.data[0] = {1}.data.sum()",
    "{0}.data[1:].zero_()",
)  # fmt: skip


@statement()
def data_buffer(d: Draft) -> None:
    if d.place.body:
        raise Unfit
    x = d.value(lambda v: v.dim() == 2)
    d.do(d.pick(_BUFFER).format(d.buffer(d.shape(x)[-1]), x))


@statement()
def set_memory(d: Draft) -> None:
    """A new tensor takes over the memory of a value, which nothing else has."""
    source = d.let(f"{d.value(lambda v: v.dim() >= 1)}.detach().clone()")
    fresh = d.let(f"torch.zeros_like({source})")
    d.do(f"{fresh}.set_({source})")
    if d.chance():
        d.do(f"{d.pick((fresh, source))}.mul_(2)")


@statement()
def inference(d: Draft) -> None:
    """A result of the region is copied outside, as autograd asks for.

    AOTAutograd dies of views of what was made outside, in graphs that fxamp leaves as they are too.
    """
    if d.place.body or not d.place.grad or (d.setting.ambient and d.setting.schedule == "evaluated"):
        raise Unfit
    before, plain = set(d.values), "with torch.no_grad():"
    place = replace(d.place, grad=False, inference=True)
    with d.block("with torch.inference_mode():", place, oracle=plain, alone=plain):
        d.statements(3)
    for name in [name for name in d.values if name not in before]:
        d.do(f"{name} = {name}.clone()")


_SIZES = (
    "{0} * torch.tensor({0}.shape[-1])", "{0} / torch.tensor(float({0}.shape[0]))",
    "{0} + torch.tensor([{0}.shape[0], 2]).sum()", "{0} * torch.tensor({0}.shape[0])",
    "{0} * torch.tensor({0}[::2].shape[0], dtype=torch.float32)",
    "{0} * torch.tensor(F.interpolate({0}.float()[None, None], scale_factor=0.5).shape[2])",
    "{0} * torch.as_tensor({0}.size(0), dtype=torch.float32)",
)  # fmt: skip


@statement()
def size_tensor(d: Draft) -> None:
    d.let(d.pick(_SIZES).format(d.value(lambda v: v.dim() >= 1)))


_TRANSFORMS = (
    "torch.vmap(lambda a, b: a @ b.t())({0}, {0})", "torch.vmap(lambda a: (a * 2).softmax(-1))({0})",
    "torch.vmap(lambda a: a @ {0}[0].t())({0})", "torch.func.grad(lambda a: (a @ {0}[0].t()).float().sum())({0})",
    "torch.vmap(lambda a: a @ ({0}[0].t() @ {0}[0]).float())({0})",
    "torch.func.vjp(torch.sin, {0})[1]({0})[0]", "torch.func.jvp(torch.sin, ({0},), ({0},))[1]",
    "(lambda y, pull: y.sum() + pull(y)[0])(*torch.func.vjp(lambda a: a @ {0}[0].t(), {0}))",
    "torch.func.jacrev(lambda a: (a @ {0}[0].t()).float().sum())({0})",
    "torch.func.vmap(torch.func.vjp(torch.tanh, {0})[1])({0}[None])[0][0]",
)  # fmt: skip


@statement()
def transform(d: Draft) -> None:
    """Everything inside keeps its captured dtypes, which are autocast's only where Dynamo captures under it."""
    if not d.setting.ambient or d.place.body or d.place.region:
        raise Unfit
    d.let(d.pick(_TRANSFORMS).format(d.ranked(3)))


@statement()
def cell(d: Draft) -> None:
    """Two steps of an LSTM cell, written out."""
    x = d.ranked(2)
    size = d.shape(x)[1]
    weights = ", ".join(d.weight(*shape) for shape in ((16, size), (16, 4), (16,), (16,)))
    state = d.let(f"torch.zeros({x}.shape[0], 4)"), d.let(f"torch.zeros({x}.shape[0], 4)")
    for _ in range(2):
        first, second = d.let_several(f"torch.lstm_cell({d.lowered(x)}, ({state[0]}, {state[1]}), {weights})", 2)
        state = first, second


_LAYERS = (
    "torch.gru({}, {}, ({}), True, 1, 0.0, False, False, True)[0]",
    "torch.rnn_tanh({}, {}, ({}), True, 1, 0.0, False, False, True)[0]",
    # For an input that needs a gradient, the value that Dynamo foresees has a different dtype than the kernel's.
    "torch.lstm({0}.detach(), ({1}, {1}), ({2}), True, 1, 0.0, False, False, True)[0]",
)


@statement()
def recurrent(d: Draft) -> None:
    """What nn.GRU, nn.RNN and nn.LSTM call. AOTAutograd takes their cells, which add up in another order.

    torch checks no sizes here: the state has the rows of every input that comes.
    """
    if d.setting.lowering != "eager" or d.place.body or d.place.region:
        raise Unfit
    x = d.ranked(2, 3)
    if len(d.shape(x)) == 2:
        x = d.let(f"{x}[:, None]")
    size = d.shape(x)[2]
    # Of any number of rows an LSTM runs as cells too.
    code = d.pick(_LAYERS[:2] if d.setting.schedule == "larger" or d.sizes_vary else _LAYERS)
    gates = 4 * (3 if "gru" in code else 4 if "lstm" in code else 1)
    weights = ", ".join(d.weight(*shape) for shape in ((gates, size), (gates, 4), (gates,), (gates,)))
    d.let(code.format(x, f"torch.zeros(1, {x}.shape[0], 4)", weights))


_MASKED = (
    "{0}[{0} > 0].sum()", "torch.zeros_like({0}).index_add(0, torch.nonzero({0}[:, 0] > 0)[:, 0], {0}[{0}[:, 0] > 0])",
    "{0}.repeat_interleave(torch.tensor([1, 2])[torch.arange({0}.shape[0]) % 2], 0).sum(0)",
    "{0} * {0}.detach().abs().amax().item()",
)  # fmt: skip


@statement()
def masked(d: Draft) -> None:
    """Sizes and numbers that depend on values, which a setting of Dynamo's captures."""
    d.let(d.pick(_MASKED).format(d.ranked(2)))
