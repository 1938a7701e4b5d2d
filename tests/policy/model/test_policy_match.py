"""Where a policy holds: ``[match]``, checked against facts that are given, and against this machine."""

from typing import Any

import pytest
import torch

from fxamp.backend import machine
from fxamp.errors import PolicyError
from fxamp.policy import Policy
from fxamp.policy.model.match import CPU_FEATURES


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


def test_all_that_does_not_match_is_said_at_once() -> None:
    with pytest.raises(PolicyError, match=r"needs torch >=9.0, but .*; and compute capability >=8.0, but"):
        policy(torch=">=9.0", capability=">=8.0").resolve("cuda", capability="7.0")


def test_what_is_unknown_is_not_checked_and_said() -> None:
    assert policy(capability=">=99.0").resolve("cuda").unchecked == ("capability >=99.0",)
    assert policy(device="cpu", cpu_features=("amx_bf16",)).resolve().unchecked == ("cpu_features amx_bf16",)


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ({"capability": "8.0"}, "'8.0' is not a compute capability"),
        ({"torch": "new"}, "'new' is not a version comparison"),
        ({"device": "cpu", "cpu_features": ("avx512_bf61",)}, r"not a CPU feature .*did you mean 'avx512_bf16'"),
        ({"cpu_features": ("avx2",)}, "cpu_features is for device = 'cpu', but this policy has device = 'cuda'"),
        ({"device": "xpu", "capability": ">=8.0"}, "capability is for device = 'cuda'"),
    ],
)
def test_conditions_are_checked_when_a_policy_is_made(match: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy(**match)


def test_the_features_are_those_that_torch_documents() -> None:
    documented = torch.cpu.get_capabilities.__doc__ or ""
    assert [name for name in CPU_FEATURES if name not in documented] == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_backend_checks_this_machine(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": False, "cpu_name": "x"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    conditions = {"cpu": ({"cpu_features": ("avx2",)}, {"cpu_features": ("amx_bf16",)})}
    good, bad = {**conditions, "cuda": ({"capability": "<8.0"}, {"capability": ">=8.0"})}[device]
    assert machine.resolve_here(policy(device=device, **good), device).unchecked == ()
    with pytest.raises(PolicyError, match="lacks amx_bf16" if device == "cpu" else "has 7.5"):
        machine.resolve_here(policy(device=device, **bad), device)


def test_a_compile_under_a_policy_for_another_machine_is_refused() -> None:
    mine = policy(device="cpu", torch=">=99.0")
    with pytest.raises(PolicyError, match=r"it needs torch >=99.0, but this is torch 2"):
        torch.compile(lambda x: x + 1, backend="fxamp", options={"policy": mine})(torch.ones(2))
