"""The policy that a model's evidence is about, and what it means on this machine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fxamp.backend.machine import resolve_here
from fxamp.errors import OptionError, PolicyError
from fxamp.policy import Policy
from fxamp.tools.policy.batches import Workload


def base_policy(
    given: str | None, work: Workload, notice: Callable[[str], None], runs: bool, emulate: bool = False
) -> tuple[str, Policy]:
    """Return the name (or path) and the policy to work on, resolved: ``given``, else float16 on the model's device.

    A policy for another device than the model's decides which calls are cast; with ``runs`` it is also run, by the
    kernels of the model's device, which is refused unless ``emulate``; either way ``notice`` is told.
    """
    device = work.device()
    name = given or f"{device}-float16"
    policy = Policy.load(name)
    if policy.device == device:
        return name, resolve_here(policy, device)
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
    return name, replace(resolved, device=device, capability="", cpu_features=())


def refuse_overwriting(policy: str | None, output: str | None) -> None:
    """Raise OptionError if the patch would be written over the policy that it extends, or to no policy file."""
    if output is None:
        return
    if not output.endswith(".toml"):
        raise OptionError(f"--output {output!r}: a policy file's name ends in .toml; accepted: '{output}.toml'")
    if policy is not None and Path(policy).resolve() == Path(output).resolve():
        raise OptionError(f"--output {output!r} is the policy to extend; accepted: another file")
