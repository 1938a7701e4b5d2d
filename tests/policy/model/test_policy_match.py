"""Where a policy holds: ``[match]``, checked against facts that are given, and against this machine."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.machines.simulated_gpus import SimulatedGpus
from torch._subclasses.fake_tensor import FakeTensorMode

from fxamp.backend import policy_choice, policy_in_force
from fxamp.backend.options import parse_options
from fxamp.errors import PolicyError
from fxamp.policy import Category, Policy, Rule
from fxamp.policy.model.match import CPU_FEATURES
from fxamp.policy.model.recipe import RECIPES_OF


def policy(**match: Any) -> Policy:
    return Policy(**{"name": "mine", "device": "cuda", "lower_precision_fp": "float16", **match})


@pytest.mark.parametrize(
    ("match", "facts", "refused"),
    [
        ({"capability": ">=8.0"}, {"capability": "8.6"}, None),
        ({"capability": ">=8.0"}, {"capability": (10, 0)}, None),
        ({"capability": ">=8.0"}, {"capability": (7, 5)}, "compute capability >=8.0, but this device has 7.5"),
        ({"capability": "==9"}, {"capability": (9, 4)}, None),
        ({"capability": ">=8.0,<9.0"}, {"capability": (9, 0)}, "compute capability >=8.0,<9.0"),
        ({"arch": ["gfx942", "gfx950"]}, {"arch": "gfx950"}, None),
        ({"arch": ["gfx942", "gfx950"]}, {"arch": "gfx90a"}, "gfx942 or gfx950 where the GPU is AMD's, but .* gfx90a"),
        ({"arch": ["gfx950"]}, {"capability": "9.0"}, r"an AMD GPU \(gfx950\), but this one is NVIDIA's, of .* 9.0"),
        ({"capability": ">=8.9"}, {"arch": "gfx90a"}, "an NVIDIA GPU of compute capability >=8.9, but .* AMD's gfx90a"),
        ({"capability": ">=8.9", "arch": ["gfx950"]}, {"arch": "gfx950"}, None),
        ({"capability": ">=8.9", "arch": ["gfx950"]}, {"capability": "9.0"}, None),
        ({"capability": ">=8.9", "arch": ["gfx950"]}, {"capability": "8.0"}, "compute capability >=8.9, but .* 8.0"),
        ({}, {"arch": "gfx942"}, None),
        ({"torch": ">=2.11"}, {"torch_version": "2.11.0+cu130"}, None),
        ({"torch": ">=2.14"}, {"torch_version": "2.13.0"}, "torch >=2.14, but this is torch 2.13.0"),
        ({"device": "cpu", "cpu_features": ("avx2",)}, {"cpu_features": {"avx2", "avx"}}, None),
        (
            {"device": "cpu", "cpu_features": ("avx2", "amx_bf16")},
            {"cpu_features": ["avx2"]},
            "the CPU features avx2, amx_bf16, but this CPU lacks amx_bf16",
        ),
    ],
)
def test_a_policy_is_refused_where_it_does_not_match(match: Any, facts: Any, refused: str | None) -> None:
    mine = policy(**match)
    if refused is None:
        assert mine.resolve(**facts) == mine and mine.resolve(**facts).unchecked == ()
        return
    with pytest.raises(PolicyError, match=f"policy 'mine' does not match: it needs {refused}"):
        mine.resolve(**facts)


def test_all_mismatches_are_reported_at_once() -> None:
    with pytest.raises(PolicyError, match=r"needs torch >=9.0, but .*; and compute capability >=8.0, but"):
        policy(torch=">=9.0", capability=">=8.0").resolve("cuda", capability="7.0")


def test_unknown_facts_are_not_checked_but_reported() -> None:
    assert policy(capability=">=99.0").resolve("cuda").unchecked == ("capability >=99.0",)
    assert policy(arch=["gfx950"]).resolve("cuda").unchecked == ("arch gfx950",)
    assert policy(device="cpu", cpu_features=("amx_bf16",)).resolve().unchecked == ("cpu_features amx_bf16",)


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ({"capability": "8.0"}, "'8.0' is not a compute capability"),
        ({"torch": "new"}, "'new' is not a version comparison"),
        ({"device": "cpu", "cpu_features": ("avx512_bf61",)}, r"not a CPU feature .*did you mean 'avx512_bf16'"),
        ({"cpu_features": ("avx2",)}, "cpu_features is for device = 'cpu', but this policy has device = 'cuda'"),
        ({"device": "xpu", "capability": ">=8.0"}, "capability is for device = 'cuda'"),
        ({"device": "cpu", "arch": ["gfx950"]}, "arch is for device = 'cuda', but this policy has device = 'cpu'"),
        ({"arch": ["sm_90"]}, "'sm_90' is not an AMD GPU's architecture; .*capability is for NVIDIA GPUs"),
        ({"arch": ["gfx90A"]}, "'gfx90A' is not an AMD GPU's .*did you mean 'gfx90a'"),
    ],
)
def test_conditions_are_checked_when_a_policy_is_made(match: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy(**match)


def test_the_features_are_those_that_torch_documents() -> None:
    documented = torch.cpu.get_capabilities.__doc__ or ""
    assert [name for name in CPU_FEATURES if name not in documented] == []


def test_the_backend_checks_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": False, "cpu_name": "x"})
    cpu = torch.device("cpu")
    assert policy_in_force.resolve_here(policy(device="cpu", cpu_features=("avx2",)), cpu).unchecked == ()
    with pytest.raises(PolicyError, match="lacks amx_bf16"):
        policy_in_force.resolve_here(policy(device="cpu", cpu_features=("amx_bf16",)), cpu)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current one is old, the second is new."""

    def capability(device: torch.device | None = None) -> tuple[int, int]:
        return (9, 0) if device is not None and device.index == 1 else (7, 5)

    replaced = {"is_available": lambda: True, "device_count": lambda: 2, "get_device_capability": capability}
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def fake_inputs() -> list[Any]:
    """Made before GPUs are simulated: torch 2.11 puts a tensor on one that it finds."""
    with FakeTensorMode():
        return [torch.ones(2), torch.ones(2, device="meta"), torch.empty(2, device="cuda:1"), 3]


def test_the_backend_checks_the_gpu_of_the_graph(fake_inputs: list[Any], two_gpus: None) -> None:
    new = policy(capability=">=8.9")
    assert policy_in_force.resolve_here(new, torch.device("cuda", 1)).unchecked == ()
    with pytest.raises(PolicyError, match=r"has 7\.5"):
        policy_in_force.resolve_here(new, torch.device("cuda", 0))
    assert policy_in_force.resolve_here(new, torch.device("cuda", 2)).unchecked  # a fake tensor's
    assert policy_choice.device_of(fake_inputs) == torch.device("cuda", 1)
    assert policy_choice.choose_policy(parse_options({"policy": new}), fake_inputs).policy == new


@pytest.mark.usefixtures("two_gpus")
def test_bfloat16_is_asked_of_the_gpu_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = SimulatedGpus(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: gpus.current == 1)
    assert policy_choice.native_bfloat16(torch.device("cuda", 1)) and not policy_choice.native_bfloat16(
        torch.device("cuda", 0)
    )


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    "arch, reasons",
    [
        (
            "gfx90a",
            [
                "needs gfx942 or gfx950 where the GPU is AMD's, but this one is gfx90a",
                "gfx90a has no products in 8 bits",
            ],
        ),
        ("gfx942", []),
        ("gfx950", []),
    ],
)
def test_fp8_on_amds_gpus(arch: str, reasons: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They report capabilities above 8.9."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    device = torch.device("cuda", 1)
    assert policy_in_force.resolve_here(Policy.load("cuda-bfloat16"), device).unchecked == ()
    for name in ("cuda-bfloat16-fp8", "cuda-float16-fp8-rowwise"):
        if not reasons:
            here = policy_in_force.resolve_here(Policy.load(name), device)
            recipes = {rule.recipe for rule in here.rules if rule.in_fp8}
            assert here.unchecked == () and {recipe.endswith("_fnuz") for recipe in recipes} == {arch == "gfx942"}
            assert policy_in_force.resolve_here(here, device) == here
            assert (here.digest == Policy.load(name).resolve("cuda").digest) is (arch == "gfx950")
            continue
        with pytest.raises(PolicyError) as raised:
            policy_in_force.resolve_here(Policy.load(name), device)
        assert [reason for reason in reasons if reason not in str(raised.value)] == []
    own = replace(Policy.load("cuda-bfloat16-fp8"), capability="", arch=())
    assert (not reasons) is (_refusal(own, device) == "")


def test_fnuz_formats_are_refused_where_gpus_lack_them() -> None:
    own = policy(rules=(Rule("products", Category.FP8, ("linear",), recipe="rowwise_fnuz"),))
    assert own.resolve("cuda", arch="gfx942") == own.resolve("cuda") == own
    refused = r"fnuz formats \(recipe 'rowwise_fnuz'\): gfx942, but this GPU is "
    for facts, name in (({"arch": "gfx950"}, "AMD's gfx950"), ({"capability": "9.0"}, "NVIDIA's")):
        with pytest.raises(PolicyError, match=refused + name):
            own.resolve("cuda", **facts)


def _refusal(policy: Policy, device: torch.device) -> str:
    try:
        policy_in_force.resolve_here(policy, device)
    except PolicyError as refused:
        return str(refused)
    return ""


def test_a_compile_under_a_policy_for_another_machine_is_refused() -> None:
    mine = policy(device="cpu", torch=">=99.0")
    with pytest.raises(PolicyError, match=r"it needs torch >=99.0, but this is torch 2"):
        torch.compile(lambda x: x + 1, backend="fxamp", options={"policy": mine})(torch.ones(2))


@pytest.mark.parametrize(
    ("cast", "facts", "refused"),
    [
        ("fp8", {"capability": "8.9"}, ""),
        ("fp8", {"capability": "8.0"}, r"products in fp8: compute capability >=8\.9, but this device has 8\.0"),
        ("mxfp8", {"capability": "10.0"}, ""),
        ("mxfp8", {"capability": (12, 0)}, ""),
        ("mxfp8", {"capability": "9.0"}, r"products in mxfp8: compute capability >=10\.0, but this device has 9\.0"),
        ("mxfp8", {"arch": "gfx950"}, "products in mxfp8, .*NVIDIA GPUs only, but this one is AMD's gfx950"),
        ("nvfp4", {"capability": "10.0"}, ""),
        ("nvfp4", {"capability": "9.0"}, r"products in nvfp4: compute capability >=10\.0, but this device has 9\.0"),
        ("nvfp4", {"arch": "gfx950"}, "products in nvfp4, .*NVIDIA GPUs only, but this one is AMD's gfx950"),
    ],
)
def test_a_gpu_without_such_products_is_refused_even_where_match_allows_it(
    cast: str, facts: dict[str, Any], refused: str
) -> None:
    category = Category(cast)
    rule = Rule("products", category, ("linear",), recipe=RECIPES_OF[category][0])
    own = policy(rules=(rule,))
    if not refused:
        assert own.resolve("cuda", **facts).has_fp8
        return
    with pytest.raises(PolicyError, match=refused):
        own.resolve("cuda", **facts)
