"""Recompile a graph if its policy would no longer be chosen.

torch.compile compares options by value, so a path stays equal while the file behind it changes. fxamp adds a guard to
Dynamo's that is called in each call of a graph; it recompiles if the file decides otherwise, if the environment names
another policy, or if the working directory has changed and holds another file of a relative path.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from fxamp.backend.choose import IN_BACKWARD, Choice
from fxamp.backend.options import Options
from fxamp.backend.policy_file import Unchanged
from fxamp.backend.surroundings import Surroundings
from fxamp.policy.file.paths import is_file
from fxamp.torch_private import guard_current_graph, running_backward

_NAME = "__fxamp_policy_is_unchanged"
_IN_BACKWARD = "__fxamp_a_backward_runs"
_SURROUNDINGS = "__fxamp_autocast_and_training_are_as_before"


def guard_policy(options: Options, choice: Choice, device: torch.device | None) -> None:
    """Guard the graph being compiled, for tensors on ``device``, against a change of its policy.

    Does nothing outside torch.compile.
    """
    guard_current_graph(_NAME, _freshness(options, choice, device))
    if choice is IN_BACKWARD:
        guard_current_graph(_IN_BACKWARD, lambda: running_backward() != -1)
    if choice.surroundings is not None:
        guard_current_graph(_SURROUNDINGS, lambda: Surroundings.now() == choice.surroundings)


def _freshness(options: Options, choice: Choice, device: torch.device | None) -> Callable[[], bool]:
    """Return a cheap test whether the policy would be read the same again."""
    variable, path = os.environ.get("FXAMP_POLICY"), options.policy
    if choice.policy is None or not isinstance(path, str) or not path.endswith(".toml"):
        return lambda: os.environ.get("FXAMP_POLICY") == variable
    unchanged = Unchanged(path, device, choice.policy)
    if Path(options.named).is_absolute():
        return lambda: os.environ.get("FXAMP_POLICY") == variable and unchanged()
    # Programs in other folders may have equal options, for which Dynamo shares graphs: whose they are, options tell.
    folder, named = os.getcwd(), options.named  # noqa: PTH109 (called in each call of a graph)
    return lambda: (
        os.environ.get("FXAMP_POLICY") == variable
        and (os.getcwd() == folder or not is_file(named))  # noqa: PTH109
        and unchanged()
    )
