"""Resolution as algebra: files are read in an order, dumps read back, the last rule wins."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxamp.policy import Category, LossScale, Policy, Rule, Site, TensorFacts
from fxamp.policy.model.recipe import RECIPES_OF

HEAD = 'lower_precision_fp = "float16"\n[match]\ndevice = "cuda"\n'
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.one_of(st.text(st.characters(codec="utf-8"), max_size=12), st.just("\x7f \" ' \\ \r\n # é"))
words = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
ops = st.sampled_from(["mm", "sum", "sum.dim_IntList", "exp", "s*", "mylib::op", "[em]*", "aten::relu.default"])
sizes = st.one_of(st.integers(0, 99), st.sampled_from([">4096", ">=2,<64", " ==3 ", "!=1", " %16", "%3,<9"]))
plain = st.one_of(st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False, width=32), texts)
tensors = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.just("float32"), st.lists(st.sampled_from(["float16", "float32"]), min_size=1)),
        "rank": sizes,
        "size": sizes,
        "shape": st.lists(st.one_of(st.just("*"), sizes), max_size=3).map(lambda dims: ["...", *dims]),
    },
).filter(bool)
names_of_arguments = st.one_of(words, texts)
arguments = st.dictionaries(names_of_arguments, st.one_of(plain, st.lists(plain, max_size=3), tensors), max_size=2)


@st.composite
def rules(draw: st.DrawFn, name: str) -> Rule:
    cast = draw(st.sampled_from(list(Category)))
    narrow = draw(st.integers(0, 2)) == 0  # else only the ops decide, so that several rules cover a call
    one_dtype = cast in (Category.FP32, Category.LOWER_PRECISION_FP)
    return Rule(
        name,
        cast,
        ("mm",) if cast in RECIPES_OF else tuple(draw(st.lists(ops, min_size=1, max_size=3))),
        why=draw(texts),
        torch=draw(st.sampled_from([None, ">=2.11", "<2.12"])),
        advice="do not" if cast is Category.BANNED else "",
        recipe=draw(st.sampled_from(RECIPES_OF[cast])) if cast in RECIPES_OF else "",
        modules=tuple(draw(st.lists(st.sampled_from(["layers.*.router", ".norm", "a.**.b"]), max_size=2 * narrow))),
        module_classes=tuple(draw(st.lists(st.sampled_from(["*Norm", "torch.nn.Linear"]), max_size=2 * narrow))),
        args=draw(arguments) if narrow else {},
        reduces=draw(st.sampled_from(["", ">4096"])) if narrow else "",
        region=draw(st.sampled_from(["forward", "backward", "both"])) if one_dtype else "forward",
        inputs=draw(st.dictionaries(names_of_arguments, st.sampled_from(["fp32", "follow"]), max_size=2))
        if one_dtype
        else {},
    )


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    ids = st.one_of(words, texts).filter(lambda word: word.strip() and word != "unlisted")
    names = draw(st.lists(ids, unique=True, max_size=4))
    scale = st.builds(LossScale, init_scale=st.floats(1, 2**20), enabled=st.booleans(), max_scale=st.just(2.0**20))
    return Policy(
        "drawn",
        draw(st.sampled_from(["cuda", "xpu"])),
        draw(st.sampled_from(["float16", "bfloat16"])),
        outputs=draw(st.sampled_from(["captured", "keep"])),
        rules=tuple(draw(rules(name)) for name in names),
        unlisted=draw(st.sampled_from(["follow", "fp32", "promote"])),
        torch=draw(st.sampled_from(["", ">=2.11"])),
        loss_scale=draw(st.none() | scale),
    )


@quick
@given(policies(), st.sampled_from(["2.11.0", "2.13.1"]))
def test_a_dumped_policy_reads_back_as_the_same(policy: Policy, version: str) -> None:
    resolved = policy.resolve(torch_version=version)
    for text in (resolved.dumps(), resolved.dumps(origins=True)):
        again = Policy.loads(text)
        assert again.resolve(torch_version=version) == resolved and again.digest == resolved.digest
        assert [rule.why for rule in again.rules] == [rule.why for rule in resolved.rules]
    assert resolved.resolve(torch_version=version) == resolved


edits = st.sampled_from([None, "fp32", "promote", "lower_precision_fp", "gone"])
tables = st.lists(st.dictionaries(st.sampled_from("abcd"), edits, max_size=4), min_size=3, max_size=4)


def table(edit: dict[str, str | None]) -> str:
    """A file's rules: one for each id, of this category, or removed where that can be."""
    written = {name: "enabled = false" if cast == "gone" else f'cast = "{cast}"' for name, cast in edit.items() if cast}
    return "".join(f'[[rule]]\nid = "{name}"\n{cast}\nops = ["{name}"]\n' for name, cast in written.items())


def load(folder: Path, **files: str) -> Policy:
    """Write files, and load the one called ``top``."""
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return Policy.load(folder / "top.toml")


def extends(*names: str) -> str:
    return f"extends = [{', '.join(repr(f'{name}.toml') for name in names)}]\n"


@quick
@given(tables)
def test_extends_is_associative(edits: list[dict[str, str | None]]) -> None:
    # What is removed must be there to remove: the first file has every rule.
    first = {name: edits[0].get(name) or "fp32" for name in "abcd"}
    first = {name: "fp32" if cast == "gone" else cast for name, cast in first.items()}
    texts = [table(edit) for edit in (first, *edits[1:])]
    known = set(first)
    for edit in edits[1:]:
        if any(cast == "gone" and name not in known for name, cast in edit.items()):
            return
        known = (known | {n for n, c in edit.items() if c}) - {n for n, c in edit.items() if c == "gone"}
    with TemporaryDirectory() as name:
        folder = Path(name)
        files = {f"f{at}": text for at, text in enumerate(texts)}
        names = list(files)
        flat = load(folder, **files, top=extends(*names) + HEAD)
        left = load(folder, **files, ab=extends(*names[:2]), top=extends("ab", *names[2:]) + HEAD)
        right = load(folder, **files, bc=extends(*names[1:]), top=extends(names[0], "bc") + HEAD)
        chain = {f"f{at}": (extends(f"f{at - 1}") if at else "") + text for at, text in enumerate(texts)}
        assert flat == left == right == load(folder, **chain, top=extends(names[-1]) + HEAD)


@quick
@given(st.permutations(["a", "b", "c"]), st.sampled_from(["fp32", "promote"]))
def test_a_rule_that_was_removed_and_written_again_is_a_new_one(order: list[str], cast: str) -> None:
    with TemporaryDirectory() as name:
        base = table(dict.fromkeys(order, "fp32"))
        loaded = load(
            Path(name),
            base=base,
            without=extends("base") + table({order[0]: "gone"}),
            top=extends("without") + HEAD + table({order[0]: cast}),
        )
    assert [(rule.id, rule.cast) for rule in loaded.rules] == [(order[1], "fp32"), (order[2], "fp32"), (order[0], cast)]


def test_a_file_that_is_reached_twice_counts_once(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        base=table({"a": "fp32", "b": "fp32"}),
        left=extends("base") + table({"a": "promote"}),
        right=extends("base") + table({"b": "gone"}),
        top=extends("left", "right") + HEAD,
    )
    assert [(rule.id, rule.cast) for rule in loaded.rules] == [("a", "promote")]


SITES = [
    Site(op, module, ("torch.nn.LayerNorm",), {"dim": -1, "self": TensorFacts("float32", (2, 64))}, region, 64)
    for op in ("aten::mm.default", "aten::sum.dim_IntList", "mylib::op")
    for module in ("layers.0.router", "")
    for region in ("forward", "backward")
]


@quick
@given(policies(), st.sampled_from(SITES))
def test_the_last_rule_that_covers_a_call_decides(policy: Policy, site: Site) -> None:
    covering = [rule for rule in policy.rules if rule.mismatch(site) is None]
    ruling = policy.ruling(site)
    assert [*ruling.lost, *([ruling.rule] if ruling.rule else [])] == covering
    named = [rule for rule in policy.rules if rule.covers_op(site.op, site.region)]
    assert {rule.id for rule, _ in ruling.inapplicable} <= {rule.id for rule in named}
    plain = policy.plain_ruling(site.op, site.region)
    assert plain is None or plain == ruling
