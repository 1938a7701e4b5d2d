"""Facts about the machine that policies can test: what kind of GPU it has, the CPU's features."""

from typing import Any

import torch

from fxamp.policy import Policy
from fxamp.torch_devices import has_gpu


def resolve_here(policy: Policy, device: torch.device | None) -> Policy:
    """Resolve ``policy`` for a graph with tensors on ``device``; None if it has no tensors.

    If this machine lacks the device (FakeTensors on a laptop), conditions on it are not checked. Raises PolicyError if
    the policy does not apply.
    """
    return policy.resolve(None if device is None else device.type, **_facts(device or torch.device(policy.device)))


def _facts(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        found = torch.cpu.get_capabilities()
        return {"cpu_features": frozenset(name for name, value in found.items() if value is True)}
    if device.type != "cuda" or not has_gpu(device):
        return {}
    if torch.version.hip:
        # Features follow the name: "gfx942:sramecc+:xnack-".
        return {"arch": torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]}
    return {"capability": torch.cuda.get_device_capability(device)}
