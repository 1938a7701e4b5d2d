"""What ``fxamp-policy fit`` may decide about products of experts: by GPU, by part of the model, as rules that hold."""

import pytest
import torch
from small_models import mixture
from torch import nn

import fxamp
from fxamp.errors import PolicyError
from fxamp.policy import Policy
from fxamp.policy.model.match import OF_EXPERTS
from fxamp.tools.policy.fit.decisions import AS_BASE, Decision, Language
from fxamp.tools.policy.fit.gpus import GPUS
from fxamp.tools.policy.fit.layers import scopes

EXPERTS = "products of experts"
IN_MXFP8 = {"mxfp8 floor", "mxfp8 rceil", "mxfp8 rceil_wgrad_with_hp"}


def decided(model: nn.Module, base: str, gpu: str) -> tuple[Language, list[Decision]]:
    language = Language(Policy.load(base), GPUS[gpu].formats)
    return language, [own for own in language.decisions(scopes(model), model) if own.name == EXPERTS]


@pytest.mark.parametrize(
    ("gpu", "names"),
    [
        ("a100", {"16 bits"}),
        ("rtx4090", {"16 bits"}),  # it has products in fp8, but torch has no grouped ones for it
        ("h100", {"16 bits", "fp8 rowwise"}),
        ("b200", {"16 bits", "fp8 rowwise"} | IN_MXFP8),
        ("mi300x", {"16 bits", "fp8 rowwise"}),
        ("mi355x", {"16 bits", "fp8 rowwise"}),  # its products in blocks take scales in another layout
    ],
)
def test_the_options_are_what_the_gpu_has_and_load_as_rules(gpu: str, names: set[str]) -> None:
    base = Policy.load("cuda-bfloat16")
    language, decisions = decided(mixture(32, 4), "cuda-bfloat16", gpu)
    assert [own.scope.name.partition(" ")[0] for own in decisions] == ["first", "middle", "last"]
    for option in (option for own in decisions for option in own.options[1:]):
        policy = language.policy(base, [option])
        assert policy != base and Policy.loads(policy.dumps()) == policy
        assert policy.resolve("cuda", capability=GPUS[gpu].capability, arch=GPUS[gpu].arch)
        cast = next(iter(policy.casts_of_experts), "")
        assert (not cast) is (option.name == "16 bits")
        if cast:
            with pytest.raises(PolicyError, match=f"products of experts in {cast}"):
                policy.resolve("cuda", capability="12.0")
    assert all({option.name for option in own.options} == {AS_BASE, *names} for own in decisions)


def test_what_gpus_lack_is_refused_among_the_shipped_too() -> None:
    ada, blackwell = (Language(Policy.load("cuda-bfloat16"), GPUS[name].formats) for name in ("rtx4090", "b200"))
    moe = Policy.load("cuda-bfloat16-fp8-rowwise-moe")
    assert not ada.multiplies(moe) and ada.multiplies(Policy.load("cuda-bfloat16-fp8-rowwise"))
    assert blackwell.multiplies(moe) and f"nvfp4{OF_EXPERTS}" not in blackwell.formats


def test_it_is_asked_where_there_are_experts_and_the_base_has_not_decided() -> None:
    dense = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Conv1d(4, 4, 3)) for _ in range(3)))
    assert not decided(nn.ModuleList([dense]), "cuda-bfloat16", "b200")[1]
    assert not decided(mixture(32, 4), "cuda-bfloat16-mxfp8-moe", "b200")[1]
    _, beside = decided(mixture(32, 4), "cuda-bfloat16-moe", "h100")
    assert {option.name for own in beside for option in own.options} == {AS_BASE, "fp8 rowwise"}


@pytest.mark.exhaustive
def test_the_answer_runs_the_layers_that_it_names() -> None:
    model, base = mixture(32, 4), Policy.load("cpu-bfloat16")
    language, (first, *_) = decided(model, "cpu-bfloat16", "b200")
    (option,) = (option for option in first.options if option.name == "mxfp8 rceil")
    policy = Policy.loads(language.policy(base, [option]).dumps())
    model.compile(backend="fxamp", options={"policy": policy, "lowering": "eager"})
    tokens = torch.arange(32).view(2, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    entries = [entry for graph in fxamp.report(model).graphs for entry in graph.listing.entries]
    experts = [entry for entry in entries if "scaled_experts" in entry.target]
    assert len(experts) == 2 and all("layers.0" in entry.module for entry in experts)
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "experts" in name)
