"""Select the policy to calibrate or bisect, and check that this machine can run it."""

from collections.abc import Callable
from dataclasses import replace

import torch

from fxamp.backend.machine import resolve_here
from fxamp.errors import OptionError, PolicyError
from fxamp.policy import Policy
from fxamp.tools.common.output import require_folder
from fxamp.tools.policy.batches import Workload


def base_policy(
    given: str | None, work: Workload, notice: Callable[[str], None], runs: bool, emulate: bool = False
) -> tuple[str, Policy]:
    """Return the name (or path) of the base policy, and the policy resolved: ``given``, else float16 for the device.

    A policy for another device than the model's decides which calls are cast. With ``runs`` its casts are also run, by
    the kernels of the model's device; this raises unless ``emulate``. In both cases ``notice`` gets a message.
    """
    device = work.device()
    name = given or f"{device}-float16"
    policy = Policy.load(name)
    if policy.device == device:
        return name, resolve_here(policy, torch.device(device))
    if runs and not emulate:
        raise PolicyError(
            f"policy {name!r} is for {policy.device}, but the model is on {device}; accepted: a policy for {device} "
            f"('{device}-{policy.lower_precision_fp}'), a model on {policy.device}, or --emulate, which runs "
            f"{policy.device}'s casts by {device} kernels"
        )
    resolved = policy.resolve()
    if not runs:
        notice(f"what policy {name!r} casts on {policy.device}, judged by float32 values that {device} kernels compute")
        return name, resolved
    notice(f"{policy.device}'s casts, computed by {device} kernels: the model is not on the device of policy {name!r}")
    return name, replace(resolved, device=device, capability="", arch=(), cpu_features=())


def refuse_overwriting(model: str, policy: str | None, output: str | None) -> None:
    """Raise OptionError if the patch would overwrite what is read, or is not a .toml file."""
    if output is None:
        return
    if not output.endswith(".toml"):
        raise OptionError(f"--output {output!r}: a policy file's name ends in .toml; accepted: '{output}.toml'")
    require_folder(output, model, policy)
