"""Policies as values: equality, digests, which rule decides, what resolves where."""

import dataclasses
import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fxamp.errors import PolicyError
from fxamp.policy import Category, LossScale, Origin, Policy, Rule, Ruling, built_in_names
from fxamp.policy.model.comparisons import holds

VALUES: list[Any] = [1, True, 1.0, 0, False, 0.0, -0.0, [1], [True], "1"]


def rule(name: str, *ops: str, cast: Category = Category.FP32, **more: Any) -> Rule:
    return Rule(name, cast, ops, **more)


def policy(*rules: Rule, **more: Any) -> Policy:
    return Policy(**{"name": "mine", "device": "cuda", "lower_precision_fp": "float16", **more}, rules=rules)


@pytest.mark.parametrize("name", built_in_names())
def test_built_in_policies_load_and_resolve(name: str) -> None:
    loaded = Policy.load(name)
    device, dtype = name.split("-")
    assert (loaded.name, loaded.device, loaded.lower_precision_fp) == (name, device, dtype)
    assert loaded.outputs == "captured"
    assert Path(loaded.sources[0]).name == f"{device}.toml" and all(Path(source).is_file() for source in loaded.sources)
    assert all(rule.why.endswith(".") and rule.origin and rule.origin.line > 1 for rule in loaded.rules)
    resolved = loaded.resolve(f"{device}:0")
    assert resolved.resolve(device) == resolved
    assert resolved.rule_for("aten::mm") == resolved.rule_for("aten::mm.default")
    assert resolved.rule_for("aten::mm").cast is Category.LOWER_PRECISION_FP  # type: ignore[union-attr]


def test_there_are_ten_built_in_policies() -> None:
    devices = ("cpu", "cuda", "mps", "mtia", "xpu")
    assert built_in_names() == tuple(f"{device}-{dtype}" for device in devices for dtype in ("bfloat16", "float16"))
    assert len({Policy.load(name).digest for name in built_in_names()}) == 10


def test_digest_is_stable_across_processes() -> None:
    code = "from fxamp.policy import Policy; print(Policy.load('cuda-float16').digest)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == Policy.load("cuda-float16").digest


def test_policies_are_compared_by_content(tmp_path: Path) -> None:
    text = '[match]\ndevice = "cpu"\n[[rule]]\nid = "a"\ncast = "fp32"\nops = ["exp"]\nwhy = "one"\n'
    (tmp_path / "table.toml").write_text(text)
    (tmp_path / "thin.toml").write_text('extends = ["table.toml"]\nlower_precision_fp = "float16"\n')
    (tmp_path / "whole.toml").write_text('lower_precision_fp = "float16"\n# a comment\n' + text.replace("one", "two"))
    thin, whole = Policy.load(tmp_path / "thin.toml"), Policy.load(str(tmp_path / "whole.toml"))
    assert thin == whole and hash(thin) == hash(whole) and thin.digest == whole.digest
    assert thin.rules[0].origin != whole.rules[0].origin
    assert pickle.loads(pickle.dumps(thin)) == thin


@pytest.mark.parametrize(
    "changed",
    [
        policy(rule("a", "exp"), device="cpu"),
        policy(rule("a", "exp"), lower_precision_fp="bfloat16"),
        policy(rule("a", "exp"), outputs="keep"),
        policy(rule("b", "exp")),
        policy(rule("a", "log")),
        policy(rule("a", "exp", cast=Category.PROMOTE)),
        policy(rule("a", "exp", torch=">=2.11")),
        policy(rule("a", "exp"), rule("b", "log")),
        policy(rule("a", "exp", cast=Category.BANNED, advice="no")),
        policy(rule("a", "exp"), unlisted="fp32"),
        policy(rule("a", "exp"), capability=">=8.0"),
        policy(rule("a", "exp"), arch=("gfx950",)),
        policy(rule("a", "exp"), torch=">=2.11"),
        policy(rule("a", "exp"), loss_scale=LossScale()),
        policy(rule("a", "exp", modules=("head",))),
        policy(rule("a", "exp", module_classes=("Linear",))),
        policy(rule("a", "exp", args={"dim": -1})),
        policy(rule("a", "exp", args={"self": {"size": ">1"}})),
        policy(rule("a", "exp", reduces=">1")),
        policy(rule("a", "exp", region="backward")),
        policy(rule("a", "exp", inputs={"self": "follow"})),
    ],
)
def test_what_decides_counts(changed: Policy) -> None:
    before = policy(rule("a", "exp"))
    assert changed != before and changed.digest != before.digest
    assert changed == dataclasses.replace(changed, name="other", sources=("x.toml",))


def test_values_of_two_types_are_two_conditions() -> None:
    for one, other in itertools.product(VALUES, repeat=2):
        first, second = (policy(rule("a", "sum.dim_IntList", args={"keepdim": value})) for value in (one, other))
        assert (first == second) is (one is other), (one, other)
        assert (first.digest == second.digest) is (hash(first) == hash(second)) is (one is other), (one, other)


def test_a_program_runs_the_code_of_its_own_policy_where_one_and_true_differ() -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 64)

    def summed(keepdim: str) -> Tensor:
        text = f'ops = ["sum.dim_IntList"]\nargs = {{ keepdim = {keepdim} }}'
        text = f'extends = ["cpu-bfloat16"]\n[[rule]]\nid = "a"\ncast = "lower_precision_fp"\n{text}'
        options: Any = {"policy": Policy.loads(text), "lowering": "eager"}
        result: Tensor = torch.compile(total, backend="fxamp", options=options)(x)
        return result

    with torch.autocast("cpu", torch.bfloat16):
        expected = {"1": total(x), "true": total(x.bfloat16()).float()}
    for keepdim, value in expected.items():
        assert torch.equal(summed(keepdim), value), keepdim


def total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def test_the_last_rule_wins_however_it_names_the_op() -> None:
    mine = policy(
        rule("glob", "upsample_*", "*_loss"),
        rule("packet", "sum", "mylib::op"),
        rule("overload", "aten::sum.dim_IntList", "mm.default"),
        rule("late-glob", "aten::mse_*"),
    )
    decided = {
        "aten::upsample_nearest1d": "glob",
        "aten::upsample_nearest1d.vec": "glob",
        "aten::nll_loss": "glob",
        "aten::sum": "packet",
        "aten::sum.default": "packet",
        "aten::sum.dim_IntList": "overload",
        "aten::mm": "overload",
        "aten::mm.dtype": None,
        "aten::mse_loss.default": "late-glob",
        "mylib::op": "packet",
        "other::op": None,
    }
    for _ in range(2):  # the second time from the cache
        assert {op: (rule_of_op := mine.rule_for(op)) and rule_of_op.id for op in decided} == decided


def test_the_losers_are_remembered_in_their_order() -> None:
    mine = policy(rule("first", "mm"), rule("other", "exp"), rule("glob", "m*"), rule("last", "mm.default"))
    first, _, glob, last = mine.rules
    assert mine.ruling("aten::mm") == Ruling(last, (first, glob))
    assert mine.ruling("aten::mm.dtype") == Ruling(glob, (first,))
    assert mine.ruling("aten::add") == Ruling(None)


def test_resolve_keeps_the_rules_of_this_torch() -> None:
    mine = policy(rule("old", "a", torch="<2.13"), rule("new", "a", torch=">=2.13"), rule("all", "b"))
    assert [rule.id for rule in mine.resolve(torch_version="2.12.1+cu130").rules] == ["old", "all"]
    assert [rule.id for rule in mine.resolve("cuda", "2.13.0").rules] == ["new", "all"]
    assert Policy.load("cuda-float16").resolve(torch_version="2.11.0").rule_for("aten::rms_norm") is None
    assert Policy.load("cuda-float16").resolve(torch_version="2.12.1").rule_for("aten::rms_norm") is not None


@pytest.mark.parametrize(
    ("condition", "version", "met"),
    [
        (">=2.12", "2.12.0", True),
        (">=2.12", "2.11.9", False),
        ("==2.13", "2.13.1+cpu", True),
        ("<=2.13", "2.13.1", True),
        (">2.13", "2.13.1", False),
        ("!=2.13", "2.13.1", False),
        (">=2.11, <2.13", "2.12.0a0+git123", True),
        (">=2.11,<2.13", "2.13.0", False),
        (">=2.9", "2.10", True),
        ("==2.13.0", "2.13", True),
    ],
)
def test_version_conditions(condition: str, version: str, met: bool) -> None:
    assert holds(condition, version) is met


def test_wrong_device_dtype_and_version_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"'cpu-float16' is for device 'cpu', but the program runs on 'cuda'"):
        Policy.load("cpu-float16").resolve("cuda:1")
    with pytest.raises(PolicyError, match=r"lower_precision_fp = 'float8' is unknown; .* \(did you mean 'float16'\?\)"):
        policy(lower_precision_fp="float8")
    with pytest.raises(PolicyError, match="'nightly' is not a torch version"):
        Policy.load("cpu-float16").resolve(torch_version="nightly")
    with pytest.raises(
        PolicyError, match=r"no policy is named 'cuda-fp16' \(did you mean 'cuda-float16'\?\); accepted: "
    ):
        Policy.load("cuda-fp16")
    with pytest.raises(PolicyError, match=r"no policy file 'nowhere/cuda-float61.toml' .did you mean 'cuda-float16'"):
        Policy.load("nowhere/cuda-float61.toml")


def test_origin_prints_as_file_and_line() -> None:
    loaded = Policy.load("cuda-float16").rule_for("aten::linear")
    assert loaded is not None and str(loaded.origin) == str(Origin("policies/accelerators.toml", loaded.origin.line))  # type: ignore[union-attr]
