"""Facts about the machine that policies can test: the GPU's compute capability, the CPU's features."""

from typing import Any

import torch

from fxamp.policy import Policy


def resolve_here(policy: Policy, device: str | None) -> Policy:
    """Resolve ``policy`` for a graph with tensors on ``device``; None if it has no tensors.

    If this machine lacks the device (FakeTensors on a laptop), conditions on it are not checked. Raises PolicyError if
    the policy does not apply.
    """
    return policy.resolve(device, **_facts(policy.device))


def _facts(device: str) -> dict[str, Any]:
    if device == "cpu":
        found = torch.cpu.get_capabilities()
        return {"cpu_features": frozenset(name for name, value in found.items() if value is True)}
    if device == "cuda" and torch.cuda.is_available():
        return {"capability": torch.cuda.get_device_capability()}
    return {}
