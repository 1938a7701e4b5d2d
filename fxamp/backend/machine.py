"""What policies ask of the machine: the compute capability of its GPU, the features of its CPU."""

from typing import Any

import torch

from fxamp.policy import Policy


def resolve_here(policy: Policy, device: str | None) -> Policy:
    """Resolve ``policy`` for a graph whose tensors are on ``device``, None if it has none.

    A device that is not in this machine (FakeTensors on a laptop) leaves conditions on it unchecked. Raises PolicyError
    where the policy does not hold.
    """
    return policy.resolve(device, **_facts(policy.device))


def _facts(device: str) -> dict[str, Any]:
    if device == "cpu":
        found = torch.cpu.get_capabilities()
        return {"cpu_features": frozenset(name for name, value in found.items() if value is True)}
    if device == "cuda" and torch.cuda.is_available():
        return {"capability": torch.cuda.get_device_capability()}
    return {}
