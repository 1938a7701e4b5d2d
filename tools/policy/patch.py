"""Shared by calibrate and bisect: options, the policy to start from, and the patch, a file that extends it."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fxamp.backend.policy_in_force import resolve_here
from fxamp.errors import OptionError, PolicyError
from fxamp.policy import LossScale, Policy, Rule
from fxamp.tools.common.command_line import Parser, positive
from fxamp.tools.common.output import require_folder
from fxamp.tools.policy.batches import Workload, load_work

NONFINITE = "options={'nonfinite': 'log'} names the first op of a training run whose result is not finite"
"""What the run itself says about inf and NaN."""


def add_model(parser: Parser, policy: str) -> None:
    """Add the options that both subcommands have; ``policy`` is the help on that one."""
    add = parser.add_argument
    add("model", metavar="MODEL.py", help="defines model and batches (or inputs), and perhaps loss(output)")
    add("--policy", metavar="P", help=policy)
    add("--output", metavar="FILE", help="write the patch to this file; standard output unless given")
    add("--batches", metavar="N", type=positive, help="take the first N batches only")


def load_model(options: Namespace, notice: Callable[[str], None]) -> Workload:
    """Load the model of the options; raise OptionError if the patch would overwrite an input, or is no .toml file."""
    if options.output is not None:
        if not options.output.endswith(".toml"):
            name = options.output
            raise OptionError(f"--output {name!r}: a policy file's name ends in .toml; accepted: '{name}.toml'")
        require_folder(options.output, options.model, options.policy)
    return load_work(options.model, notice, options.batches)


def base_policy(
    name: str | None, work: Workload, notice: Callable[[str], None], runs: bool, emulate: bool = False
) -> tuple[str, Policy]:
    """Return the name (or path) of the base policy, and the policy resolved: ``name``, else float16 for the device.

    A policy for a different device than the model's decides which calls are cast. With ``runs`` its casts are also run,
    by the kernels of the model's device; this raises unless ``emulate``. In both cases ``notice`` gets a message.
    """
    device = work.device()
    name = name or f"{device}-float16"
    policy = Policy.load(name)
    if policy.device == device:
        return name, as_run_on(device, policy)
    if runs and not emulate:
        raise PolicyError(
            f"policy {name!r} is for {policy.device}, but the model is on {device}; accepted: a policy for {device} "
            f"('{device}-{policy.lower_precision_fp}'), a model on {policy.device}, or --emulate, which runs "
            f"{policy.device}'s casts by {device} kernels"
        )
    if not runs:
        notice(f"what policy {name!r} casts on {policy.device}, with the float32 values of {device} kernels")
        return name, policy.resolve()
    notice(f"{policy.device}'s casts, computed by {device} kernels: the model is not on the device of policy {name!r}")
    return name, as_run_on(device, policy)


def as_run_on(device: str, policy: Policy) -> Policy:
    """Return ``policy`` resolved for ``device``, whose kernels also compute the casts of another device's policy."""
    if policy.device == device:
        return resolve_here(policy, torch.device(device))
    return replace(policy.resolve(), device=device, capability="", arch=(), cpu_features=())


def patch_text(
    base: str, policy: Policy, rules: Sequence[Rule], head: Iterable[str], init_scale: float | None, output: str | None
) -> str:
    """Return the text of a policy file that extends ``base``, a built-in name or a path, with ``rules``.

    ``policy`` is the loaded ``base``, ``head`` the lines of the comment at the top, ``init_scale`` the initial loss
    scale, None to leave it out. The file will be written to ``output``, or to the working directory.
    """
    lines = [f"# {line}" if line else "#" for line in head]
    lines += ["", f"extends = [{reach(base, output)}]"]
    if init_scale is not None:
        lines += ["", "[loss_scale]", f"init_scale = {init_scale!r}"]
        lines += _bounds(policy.loss_scale, init_scale)
    return "\n".join(lines) + "\n" + rules_text(policy, rules)


def rules_text(policy: Policy, rules: Sequence[Rule]) -> str:
    """Return ``rules`` as tables of a policy file, after an empty line; "" without rules."""
    if not rules:
        return ""
    whole = replace(policy, rules=tuple(replace(rule, origin=None) for rule in rules), loss_scale=None).dumps()
    return "\n" + whole[whole.index("[[rule]]") :]


def _bounds(base: LossScale | None, init_scale: float) -> list[str]:
    """Return the inherited bounds that the new scale would violate, set to the new scale."""
    low, high = (None, None) if base is None else (base.min_scale, base.max_scale)
    bounds = ["min_scale"] if low is not None and low > init_scale else []
    bounds += ["max_scale"] if high is not None and high < init_scale else []
    return [f"{bound} = {init_scale!r}" for bound in bounds]


def reach(base: str, output: str | None) -> str:
    """Return ``base`` in quotes as the file names it: a name unchanged; a path relative to the file, or absolute."""
    if not base.endswith(".toml"):
        return _quoted(base)
    path, folder = Path(base).resolve(), Path(output or "patch.toml").resolve().parent
    return _quoted(path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix())


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
