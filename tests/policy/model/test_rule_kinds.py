"""Every key of every kind of rule is read, written, compared and explained, and no kind takes a key of another."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fxamp.policy import CastRule, Policy, Rule, Site
from fxamp.policy.diff.policy_diff import diff_policies
from fxamp.policy.file.schema import KINDS
from fxamp.policy.model.keys import COUNT, Condition, Key, declared, size
from fxamp.policy.model.rule import keys_of
from fxamp.policy.model.site import REGIONS
from fxamp.tools.diff.words import groups
from fxamp.tools.policy.command import main

#: A rule of each kind; and of its kind, rules that some keys need.
RULES: dict[str, dict[str, Any]] = {
    "cast": {"cast": "lower_precision_fp", "ops": ("mm",)},
    "keep": {"keep": "int8", "ops": ("mm",)},
    "chunks": {"chunks": 64, "ops": ("cross_entropy_loss",)},
    "drop": {"drop": True, "modules": ("head",)},
    "recipe": {"cast": "fp8", "recipe": "tensorwise", "ops": ("mm",)},
    "advice": {"cast": "banned", "advice": "Do not.", "ops": ("mm",)},
}

#: Another value of each key.
OTHERS: dict[str, Any] = {
    "id": "b",
    "why": "It is small.",
    "torch": ">=2.1",
    "region": "backward",
    "ops": ("addmm",),
    "modules": ("lm_head",),
    "module_classes": ("Linear",),
    "args": {"self": {"size": ">4"}},
    "cast": "fp32",
    "recipe": "rowwise",
    "advice": "Use logits.",
    "inputs": {"mat2": "fp32"},
    "reduces": ">4",
    "keep": "float8_e5m2",
    "block": 64,
    "elements": ">=8",
    "read_by": ("gelu",),
    "chunks": 128,
    "gradients": "backward",
}
ONE_VALUE = {("keep", "region"), ("chunks", "region"), ("drop", "region"), ("drop", "drop")}
KEYS = [(kind.main_key, key) for kind in KINDS for key in keys_of(kind) if (kind.main_key, key) not in ONE_VALUE]


def policy(rule: Rule) -> Policy:
    return Policy("p", "cuda", "bfloat16", rules=(rule,))


@pytest.mark.parametrize(("kind", "key"), KEYS)
def test_a_changed_key_is_written_read_back_and_found(kind: str, key: str) -> None:
    old = Rule("a", **RULES.get(key, RULES[kind]))
    new = replace(old, **{key: OTHERS[key]})
    assert new.main_key == kind and type(new) is type(old) and getattr(new, key) != getattr(old, key)
    assert Policy.loads(policy(new).dumps()).resolve() == policy(new).resolve()
    assert Policy.loads(policy(new).dumps()).rules[0].why == new.why
    diff = diff_policies(policy(old), policy(new))
    if key in ("id", "why"):
        assert diff.same and [change.kind for change in diff.rules] == (["renamed"] if key == "id" else [])
        return
    assert policy(old).digest != policy(new).digest
    assert [one.key for change in diff.rules for one in change.keys] == [key]
    assert bool(diff.ops) is (key != "torch")
    for group in groups(diff.ops):
        before, _, after = group.heading.partition(",")[0].partition(" -> ")
        assert before != after


def test_no_kind_takes_a_key_of_another() -> None:
    for kind in KINDS:
        for name in OTHERS.keys() - keys_of(kind):
            with pytest.raises(TypeError, match=f"{kind.__name__} has no argument '{name}'"):
                kind("a", **RULES[kind.main_key], **{name: OTHERS[name]})


def test_conditions_have_words() -> None:
    for kind in KINDS:
        for name, value in OTHERS.items():
            if name != "ops" and isinstance(keys_of(kind).get(name), Condition):
                rule = Rule("a", **{**RULES[kind.main_key], name: value})
                words = {other: list(condition.words(own)) for other, condition, own in rule.conditions()}
                assert len(words[name]) == 1 and words[name][0], name


@pytest.mark.parametrize(
    ("ops", "message"),
    [("mm", "ops = 'mm' has the wrong type; accepted: a list of strings"), (("my op",), "'my op' is not an op name")],
)
def test_values_given_in_python_are_checked_as_those_in_files(ops: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"rule 'a': {message}"):
        Rule("a", "fp32", ops)


@pytest.mark.parametrize("region", REGIONS)
def test_a_call_that_no_rule_covers_is_explained_in_every_region(
    region: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "p.toml").write_text(policy(Rule("a", "fp32", ("exp",))).dumps())
    assert main(["explain", "mm", "--policy", str(tmp_path / "p.toml"), "--region", region]) == 0
    assert f"aten::mm in the {region}" in capsys.readouterr().out


def test_a_field_is_all_that_a_new_key_needs() -> None:
    @dataclass(frozen=True)
    class Wider(CastRule):
        small: str = size("elements", "Only small results.", "the number of its elements", "small ({})")
        margin: int = declared(Key(COUNT, "How far from the limit."), default=0)

    old, new = (Wider("a", "fp32", ("mm",), small="<8", margin=margin) for margin in (1, 2))  # type: ignore[arg-type]
    assert {"small": "<8", "margin": 2}.items() <= new.content().items()
    assert new.mismatch(Site("aten::mm.default", elements=9)) is not None
    assert new.mismatch(Site("aten::mm.default", elements=7)) is None
    diff = diff_policies(policy(old), policy(new))
    assert [one.key for change in diff.rules for one in change.keys] == ["margin"]
    assert [change.when for change in diff.ops] == [("small (<8)",)] * len(diff.ops) and diff.ops
    with pytest.raises(ValueError, match="rule 'a': 'many' is not a size"):
        Wider("a", "fp32", ("mm",), small="many")  # type: ignore[arg-type]
