"""The value that a captured graph records for a node: Dynamo's ``example_value``, torch.export's ``val``."""

from typing import Any

from torch.fx import Node

_KEYS = ("example_value", "val")


def is_recorded(node: Node) -> bool:
    """Whether the capture recorded a value for ``node``."""
    return any(key in node.meta for key in _KEYS)


def recorded_value(node: Node) -> Any:
    """Return the value that the capture recorded for ``node``, in the capture's own fake mode; None without one."""
    return next((node.meta[key] for key in _KEYS if key in node.meta), None)
