"""Mixtures of experts: rows are routed by top-k, and gathered again by masks, index_add or scatter."""

from programs.draft import Draft
from programs.statements.registry import statement

_COUNT = 2


def _routed(d: Draft) -> tuple[str, str, list[str], str, str]:
    """The rows, a value of their output's shape, the experts' weights, and the router's scores and choices."""
    x = d.ranked(2)
    size = d.shape(x)[-1]
    experts = [d.weight(size, size) for _ in range(_COUNT)]
    logits = d.let(f"F.linear({d.lowered(x)}, {d.weight(_COUNT, size)})")
    dtype = d.pick(("", ", dtype=torch.float32"))
    scores, chosen = d.let_several(f"{logits}.softmax(-1{dtype}).topk({d.pick((1, 2))}, -1)", 2)
    out = d.let(d.pick(("torch.zeros_like({})", "torch.zeros({}.shape)")).format(x))
    return x, out, experts, scores, chosen


@statement()
def masked_experts(d: Draft) -> None:
    """Every expert sees every row; a mask takes what the router chose."""
    x, out, experts, scores, chosen = _routed(d)
    for number, expert in enumerate(experts):
        gate = d.let(f"({scores} * ({chosen} == {number})).sum(-1, keepdim=True)")
        out = d.let(f"{out} + F.linear({d.lowered(x)}, {expert}) * {gate}")


def _alike(d: Draft, part: str, out: str) -> str:
    """``part`` in the dtype of ``out``, which Dynamo takes for a constant: right where it captures under autocast."""
    return f"{part}.to({out}.dtype)" if d.setting.ambient or d.setting.own else f"{part}.to({out})"


_GATHERED = (
    "{out}.index_add(0, {rows}, {part})",
    "{out}.scatter_add(0, {rows}[:, None].expand_as({part}), {part})",
    "torch.index_put({out}, ({rows},), {part}, accumulate=True)",
    "{out}.index_copy(0, {rows}, {part})",
)


@statement()
def sorted_experts(d: Draft) -> None:
    """Rows are sorted by expert, and each expert takes as many: sizes are fixed."""
    x, out, experts, scores, chosen = _routed(d)
    order = d.let(f"{chosen}[:, 0].argsort(stable=True)")
    share = d.shape(x)[0] // _COUNT
    for number, expert in enumerate(experts):
        rows = d.let(f"{order}[{number * share}:{(number + 1) * share}]")
        part = d.let(f"F.linear({x}[{rows}], {expert}) * {scores}[{rows}, :1]")
        out = d.let(d.pick(_GATHERED).format(out=out, rows=rows, part=_alike(d, part, out)))


@statement()
def counted_experts(d: Draft) -> None:
    """Each expert takes the rows that chose it; how many is known only when it runs, and Dynamo may break the graph."""
    d.once()
    x, out, experts, scores, chosen = _routed(d)
    for number, expert in enumerate(experts):
        d.sizes_vary = True
        rows = d.let(f"torch.where({chosen}[:, 0] == {number})[0]")
        part = d.let(f"F.linear({x}[{rows}], {expert}) * {scores}[{rows}, :1]")
        d.do(f"{out}.index_add_(0, {rows}, {_alike(d, part, out)})")


@statement()
def grouped_experts(d: Draft) -> None:
    """One product for all experts. Autocast has no category for it, and GPUs take bfloat16 alone: the program casts."""
    x = d.ranked(2)
    rows, size = d.shape(x)
    # Beyond the last offset torch leaves memory as it finds it, so the last one is the number of rows. Of a slice, as
    # Dynamo takes the size of a value from before a `t_()`.
    width, ends = 16, d.let(f"torch.tensor([{rows // 2}, {x}[:].shape[0]], dtype=torch.int32)")
    hidden = d.let(f"F.linear({d.lowered(x)}, {d.weight(width, size)}).bfloat16()")
    experts = f"{d.parameter(_COUNT, width, width)}.bfloat16()"
    d.let(f"F.linear(F.grouped_mm({hidden}, {experts}, offs={ends}).float(), {d.weight(size, width)})")
