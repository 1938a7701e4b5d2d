"""The record of the decision for one node and its reason, as fxamp-show prints it."""

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxamp.graph import INSERTED
from fxamp.policy import Rule

_KEY = "fxamp"

#: Key of ``node.meta``: the dtypes of a node's tensors when it was captured, if casts changed them.
WAS = "fxamp_was"


@dataclass(frozen=True)
class Decision:
    """The decision for one node.

    ``rule`` is the rule that applies, None if the node follows its inputs. ``lower`` is the lower-precision dtype of
    the node's autocast region, None if autocast is off. ``reason`` says why, as text. ``overruled`` says why the rule
    was not applied unchanged: for example, inputs were cast back because the op rejected them. ``lost`` are the
    matching rules that ``rule`` overrides, in their order. ``not_fp8`` says why a call that an fp8 rule names stays in
    16 bits. ``cached``: all uses of a weight in the region share its cast. ``kernel``: the dtypes, by argument, to
    which the op's autocast kernel casts; None if these are not the node's casts.
    """

    rule: Rule | None
    lower: torch.dtype | None
    reason: str
    overruled: str = ""
    lost: tuple[Rule, ...] = ()
    not_fp8: str = ""
    cached: bool = True
    kernel: tuple[tuple[str, torch.dtype], ...] | None = None


def decision(node: Node) -> Decision | None:
    """Return the decision recorded for ``node``, or None."""
    own: Decision | None = node.meta.get(_KEY)
    return own


def decide(node: Node, decided: Decision) -> None:
    """Record ``decided`` for ``node``."""
    node.meta[_KEY] = decided


def overrule(node: Node, why: str) -> None:
    """Record that the rule was not applied as it is, and why."""
    decided = decision(node)
    if decided is not None:
        decide(node, replace(decided, overruled=why))


def keep_out_of_fp8(node: Node, why: str) -> None:
    """Record that the product runs in the 16-bit dtype of its inputs instead of fp8, and why."""
    decided = decision(node)
    if decided is not None:
        decide(node, replace(decided, overruled=f"not in fp8: {why}", not_fp8=why))


def inserted_for(node: Node) -> str | None:
    """Return why fxamp inserted this cast; None for a node of the user's program."""
    why: str | None = node.meta.get(INSERTED)
    return why
