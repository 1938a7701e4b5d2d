"""The policies that ``fxamp-policy fit`` compares: shipped ones as they are, and combinations that load as files."""

from pathlib import Path

import pytest
import torch
from support.programs.small_models import mixture
from torch import nn

from fxamp.policy import Policy, variant_names
from fxamp.tools.policy.fit.answer import policy_text
from fxamp.tools.policy.fit.candidates import COMBINATIONS, LOSS_ONLY, STATE, STATE_SUFFIX, Family
from fxamp.tools.policy.fit.gpus import GPUS

FAMILIES = ("cuda-bfloat16", "cuda-float16")
DENSE = nn.Sequential(nn.Linear(8192, 8192), nn.Conv1d(4, 4, 3))


def family(base: str = "cuda-bfloat16", gpu: str = "b200") -> Family:
    return Family(base, Policy.load(base), GPUS[gpu].formats)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_variant_composed_is_the_shipped_policy(name: str) -> None:
    own = family(name)
    variants = [one.removeprefix(f"{name}-") for one in variant_names() if one.startswith(f"{name}-")]
    assert variants and all(own.compose([variant]) == Policy.load(f"{name}-{variant}") for variant in variants)
    assert own.compose([]) == Policy.load(name)


def test_a_combination_decides_what_each_of_its_variants_does() -> None:
    both, lean, fast = (family().compose(words) for words in (("lean", "fast"), ["lean"], ["fast"]))
    assert both not in (lean, fast) and both.optimizer == lean.optimizer and both.outputs == fast.outputs == "keep"
    for op in ("aten::layer_norm", "aten::add.Tensor", "aten::linear"):
        assert both.rule_for(op) == fast.rule_for(op)
    assert [rule for rule in both.rules if rule.region == "kept"] == [
        rule for rule in lean.rules if rule.region == "kept"
    ]


@pytest.mark.parametrize("loss_only", [False, True])
@pytest.mark.parametrize("base", ["cuda-bfloat16", "cuda-bfloat16-moe"])
def test_every_answer_is_a_file_that_equals_what_was_priced(base: str, loss_only: bool, tmp_path: Path) -> None:
    names = []
    with torch.device("meta"):  # of 8 GB
        model = mixture(8192, 2)
    for candidate in family(base).candidates(model, loss_only):
        text = policy_text(candidate, ["head"], str(tmp_path / "mine.toml"))
        assert Policy.loads(text) == candidate.policy and text.startswith("# head\n")
        assert (LOSS_ONLY in candidate.policy.rules) is loss_only
        names.append(candidate.name)
    assert names[0] == base and f"{base}{STATE_SUFFIX}" in names and len(set(names)) == len(names)
    assert all(f"{base}-{'+'.join(words)}" in names for words in COMBINATIONS[:2])


def test_a_base_of_the_users_own_is_extended(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('extends = ["cuda-bfloat16"]\n[[rule]]\nid = "mine"\ncast = "fp32"\nops = ["tanh"]\n')
    own = Family(str(file), Policy.load(file), GPUS["h100"].formats)
    out = tmp_path / "mine.toml"
    candidates = [*own.candidates(DENSE, loss_only=False)]
    assert any(candidate.policy.has_fp8 for candidate in candidates)
    for candidate in candidates:
        assert any(rule.id == "mine" for rule in candidate.policy.rules) and candidate.extends == str(file)
        out.write_text(policy_text(candidate, [], str(out)))
        assert Policy.load(out) == candidate.policy


@pytest.mark.parametrize(
    ("gpu", "variants"),
    [
        ("a100", set()),
        ("rtx4090", {"fp8", "fp8-rowwise"}),
        ("h100", {"fp8", "fp8-rowwise"}),
        ("b200", {"fp8", "fp8-rowwise", "mxfp8", "nvfp4"}),
        ("mi355x", {"fp8", "fp8-rowwise"}),
    ],
)
def test_products_below_16_bits_are_those_of_the_gpu(gpu: str, variants: set[str]) -> None:
    single = [own for own in family(gpu=gpu).candidates(DENSE, False) if len(own.variants) == 1]
    assert {own.variants[0] for own in single if own.policy.has_fp8} == variants
    assert not any(own.policy.has_fp8 for own in family(gpu=gpu).candidates(nn.Linear(32, 32), False))


@pytest.mark.parametrize(("gpu", "experts"), [("rtx4090", {"moe"}), ("h100", {"moe", "fp8-rowwise-moe"})])
def test_variants_for_experts_are_for_models_that_have_some(gpu: str, experts: set[str]) -> None:
    def found(model: nn.Module) -> set[str]:
        return {word for own in family(gpu=gpu).candidates(model, False) for word in own.variants if "moe" in word}

    assert found(mixture(32, 4)) == experts and not found(DENSE)


def test_state_in_8_bits_is_added_to_policies_without_an_optimizer() -> None:
    added = [own for own in family().candidates(DENSE, False) if own.name.endswith(STATE_SUFFIX)]
    assert [own.variants for own in added] == [(), ("fast",)]
    assert all(own.policy.optimizer == STATE and own.combined for own in added)
