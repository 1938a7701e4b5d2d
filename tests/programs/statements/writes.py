"""In-place writes: to values, through views, to buffers, with ``out=``."""

from programs.draft import Draft, Unfit
from programs.statements.registry import statement

_ALONE = (
    "{}.add_(1)", "{}.mul_(2)", "{}.relu_()", "{}.zero_()", "{}[0] = 0", "F.relu({}, inplace=True)", "{} += 1",
    "{}[..., 1:].mul_(3)", "{}.clamp_(-0.5, 0.5)", "{}.exp_()", "{}[{} > 0] = 1", "{}.fill_(0.3)",
    "{}.masked_fill_({} > 0, 2)", "F.silu({}, inplace=True)", "{}.t_()", "{}.neg_()", "{}.view(-1)[:2].zero_()",
    "{}.index_fill_(0, torch.tensor([0]), 1.0)",
)  # fmt: skip


@statement(weight=2)
def write(d: Draft) -> None:
    d.do(d.pick(_ALONE).replace("{}", d.writable(1)))


_BY = (
    "{}.add_({})", "{}.mul_({})", "{}.copy_({})", "{}[:] = {}", "{}[0] = {}[0]", "{} += {}", "{}[0].copy_({}[-1])",
    "{}.addcmul_({1}, {1})", "{}.lerp_({}, 0.5)", "{}[torch.tensor([0])] = {}[:1]", "{}.sub_({}, alpha=2)",
    "{}.masked_scatter_({1} > 0, {1})", "{}.index_add_(0, torch.tensor([0]), {}[:1])", "torch.add({1}, 1, out={0})",
    "{0}.index_copy_(0, torch.tensor([0]), {1}[:1])", "torch.mul({1}, {1}, out={0})",
    "{0}.index_put_((torch.tensor([0]),), {1}[:1])",
)  # fmt: skip


@statement(weight=3)
def write_value(d: Draft) -> None:
    x = d.writable(1)
    code = d.pick(_BY)
    y = d.alike(x)
    d.do(code.replace("{0}", "{}").replace("{}", x, 1).replace("{1}", y).replace("{}", y))


_PRODUCTS = (
    "{0}.addmm_({1}, {1}.t() @ {1})", "torch.mm({1}, {1}.t() @ {1}, out={0})", "{0}.copy_({1} @ ({1}.t() @ {1}))",
)  # fmt: skip


@statement()
def write_product(d: Draft) -> None:
    x = d.writable(2)
    y = d.alike(x)
    if d.share_memory(x, y):
        raise Unfit
    d.do(d.pick(_PRODUCTS).format(x, y))


_TO_BUFFER = (
    "{0}.add_({1}.detach().mean(0))", "{0}.copy_({1}.detach()[0])", "{0}.mul_(0.9).add_({1}.detach()[0], alpha=0.1)",
    "{0} += 1", "{0}.lerp_({1}.detach()[0].float(), 0.5)", "{0}[0] = {1}.detach().sum()", "{0}.zero_()",
)  # fmt: skip


@statement()
def write_buffer(d: Draft) -> None:
    if d.place.body:
        raise Unfit
    x = d.value(lambda v: v.dim() == 2)
    d.do(d.pick(_TO_BUFFER).format(d.buffer(d.shape(x)[-1]), x))


@statement()
def read_buffer(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 1)
    d.let(d.pick(("{} + {}", "{1}.clone()", "F.layer_norm({0}, {1}.shape, {1})")).format(x, d.buffer(d.shape(x)[-1])))
