"""A small listing written by hand, with one of everything that fxamp-show prints."""

from fxamp.graph_text import Document, Entry, Listing, RuleRef, Source, TensorType

TABLE = "policies/accelerators.toml"
PRODUCTS = RuleRef("matrix-products", f"{TABLE}:5", "lower_precision_fp", "Matrix products run on 16-bit units.")
NORMS = RuleRef("norm-layers", f"{TABLE}:60", "fp32", "Mean and variance are sums over many elements.")
SUMS = RuleRef("reductions", f"{TABLE}:110", "fp32_set_opt_dtype", "Sums over many elements.")
MINE = RuleRef("my-norms", "mine.toml:7", "lower_precision_fp", "")
TYPO = RuleRef("typo", "mine.toml:12", "fp32", "")

FOLLOWS = "no rule: follows its inputs"


def tensor(text: str) -> TensorType:
    """``"f16[2, 8]"`` or ``"f16[s0, 8]"`` as a type on cuda:0."""
    dtype, _, sizes = text.rstrip("]").partition("[")
    parts = [part.strip() for part in sizes.split(",") if part.strip()]
    return TensorType(dtype, tuple(int(part) if part.isdecimal() else part for part in parts), "cuda:0")


def line(number: int, code: str) -> Source:
    return Source("/models/gpt.py", number, "forward", code)


def input_entry(name: str, value: str) -> Entry:
    return Entry(name, "placeholder", name, values=(tensor(value),))


def op(name: str, target: str, inputs: tuple[str, ...], value: str, **more: object) -> Entry:
    call = f"torch.ops.{target.replace('::', '.')}({', '.join(inputs)})"
    values = {"values": (tensor(value),), "call": call, "inputs": inputs}
    return Entry(name, "call_function", target, **{**values, **more})  # type: ignore[arg-type]


def cast(name: str, of: str, value: str, why: str, **more: object) -> Entry:
    return op(name, "aten::to.dtype", (of,), value, inserted=why, **more)


def norm_and_linear() -> tuple[Entry, ...]:
    ln = {"module": "h.0.ln", "module_class": "torch.nn.LayerNorm", "source": line(10, "x = self.ln(x)")}
    attn = {"module": "h.0.attn", "module_class": "gpt.Attention", "source": line(20, "q = self.q(x).view(2, 128)")}
    for_linear = "for linear: rule matrix-products"
    return (
        op(
            "norm",
            "aten::layer_norm.default",
            ("x",),
            "f32[2, 8, 16]",
            rule=NORMS,
            reason=NORMS.why,
            region="f16",
            **ln,
        ),
        cast("norm_f16", "norm", "f16[2, 8, 16]", for_linear, **attn),
        cast("w_f16", "w", "f16[16, 16]", for_linear, **attn),
        op(
            "linear",
            "aten::linear.default",
            ("norm_f16", "w_f16"),
            "f16[2, 8, 16]",
            was=("f32",),
            rule=PRODUCTS,
            reason=PRODUCTS.why,
            lost=(MINE,),
            region="f16",
            **attn,
        ),
        op(
            "view", "aten::view.default", ("linear",), "f16[2, 128]", was=("f32",), reason=FOLLOWS, region="f16", **attn
        ),
    )


def rest() -> tuple[Entry, ...]:
    attn = {"module": "h.0.attn", "source": line(21, "return x + softmax(q)")}
    return (
        op("softmax", "aten::softmax.int", ("view",), "f32[2, 128]", rule=SUMS, reason=SUMS.why, region="f16", **attn),
        op("add", "aten::add.Tensor", ("view", "softmax"), "f32[2, 128]", reason=FOLLOWS, region="f16", **attn),
        Entry("wrap_body_0", "get_attr", "wrap_body_0", "self.wrap_body_0"),
        Entry(
            "checkpoint",
            "call_function",
            "higher_order::tag_activation_checkpoint",
            call="torch.ops.higher_order.tag_activation_checkpoint(wrap_body_0, add, w)",
            inputs=("wrap_body_0", "add", "w"),
            module="h.0",
            reason=FOLLOWS,
            bodies=("wrap_body_0",),
        ),
        Entry(
            "getitem", "call_function", "_operator.getitem", "checkpoint[0]", ("checkpoint",), (tensor("f32[2, 16]"),)
        ),
        op(
            "custom",
            "mylib::op",
            ("getitem",),
            "f32[2, 16]",
            verbatim="it is unknown",
            reason="verbatim: it is unknown",
        ),
        Entry("output", "output", "output", "(custom,)", ("custom",)),
    )


def body() -> Listing:
    asked = "for mm: rule matrix-products"
    product = {"rule": PRODUCTS, "reason": PRODUCTS.why, "was": ("f32",), "module": "h.0.mlp"}
    return Listing(
        "wrap_body_0",
        (
            input_entry("add", "f32[2, 128]"),
            input_entry("w", "f32[s0, 16]"),
            cast("add_f16", "add", "f16[2, 128]", asked, module="h.0.mlp"),
            cast("view", "w", "f16[s0, 16]", asked, module="h.0.mlp"),
            op("mm", "aten::mm.default", ("add_f16", "view"), "f16[2, 16]", **product),
            cast("mm_f32", "mm", "f32[2, 16]", "for output: the caller expects this dtype", module="h.0.mlp"),
            Entry("output", "output", "output", "(mm_f32,)", ("mm_f32",)),
        ),
    )


def gpt() -> Listing:
    return Listing(
        "GPT",
        (input_entry("x", "f32[2, 8, 16]"), input_entry("w", "f32[16, 16]"), *norm_and_linear(), *rest()),
        bodies={"wrap_body_0": body()},
        stage="cast",
        policy="cuda-float16",
        device="cuda",
        chosen="named by the caller",
        counts={"shared": 2, "folded": 0},
        unmatched=(TYPO,),
        ended="data-dependent branch at /models/gpt.py:30",
        kept_before=4096,
        kept_after=3072,
    )


def plain() -> Listing:
    """What torch itself dumps: no decision of fxamp in it."""
    return Listing("Plain", (input_entry("x", "f16[4, 4]"), op("exp", "aten::exp.default", ("x",), "f16[4, 4]")))


def document() -> Document:
    return Document((gpt(),), ("line 3: the comment is malformed",))
