"""Recompile a graph if its policy would no longer be chosen.

torch.compile compares options by value, so a path stays equal while the file behind it changes. fxamp adds a guard to
Dynamo's that compares the files' size and time, and the environment variable, on each call; a change recompiles.
"""

import os
from collections.abc import Callable
from pathlib import Path

from fxamp.backend.choose import IN_BACKWARD, Choice
from fxamp.backend.options import Options
from fxamp.backend.surroundings import Surroundings
from fxamp.policy import Policy, built_in_names
from fxamp.torch_private import guard_current_graph, running_backward

_NAME = "__fxamp_policy_is_unchanged"
_IN_BACKWARD = "__fxamp_a_backward_runs"
_SURROUNDINGS = "__fxamp_autocast_and_training_are_as_before"


def guard_policy(options: Options, choice: Choice) -> None:
    """Guard the graph being compiled against a change of its policy; does nothing outside torch.compile."""
    guard_current_graph(_NAME, _freshness(options, choice))
    if choice is IN_BACKWARD:
        guard_current_graph(_IN_BACKWARD, lambda: running_backward() != -1)
    if choice.surroundings is not None:
        guard_current_graph(_SURROUNDINGS, lambda: Surroundings.now() == choice.surroundings)


def _freshness(options: Options, choice: Choice) -> Callable[[], bool]:
    """Return a cheap test whether the policy would be read the same again."""
    variable = os.environ.get("FXAMP_POLICY")
    files = _files(options, choice)
    stamps = _stamps(files)
    return lambda: os.environ.get("FXAMP_POLICY") == variable and _stamps(files) == stamps


def _files(options: Options, choice: Choice) -> tuple[str, ...]:
    if isinstance(options.policy, Policy) or options.policy in ("auto", *built_in_names()) or choice.policy is None:
        return ()
    return choice.policy.sources


def _stamps(files: tuple[str, ...]) -> list[tuple[int, int] | None]:
    return [_stamp(Path(file)) for file in files]


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
