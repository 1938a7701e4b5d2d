"""The record of what was decided for one node, and why: what fxamp-show prints."""

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxamp.graph import INSERTED
from fxamp.policy import Rule

_KEY = "fxamp"

#: Key of ``node.meta``: the dtypes of the tensors that a node gave when it was captured, where casts changed them.
WAS = "fxamp_was"


@dataclass(frozen=True)
class Decision:
    """What holds for one node.

    ``rule`` is the rule that decides it, None if it follows its inputs. ``lower`` is the lower-precision dtype of the
    autocast region that the node stands in, None where autocast is off. ``reason`` says in words why. ``captured`` asks
    for inputs in the dtypes that they were captured with. ``overruled`` says what became of the rule: inputs were
    cast back because the op refused them, for example. ``lost`` are the rules that matched too and that ``rule``
    overrides, in their order. ``not_fp8`` says why a call that a rule for fp8 names is left in 16 bits.
    """

    rule: Rule | None
    lower: torch.dtype | None
    reason: str
    captured: bool = False
    overruled: str = ""
    lost: tuple[Rule, ...] = ()
    not_fp8: str = ""


def decision(node: Node) -> Decision | None:
    """The decision recorded for ``node``, or None."""
    found: Decision | None = node.meta.get(_KEY)
    return found


def decide(node: Node, made: Decision) -> None:
    """Record ``made`` for ``node``."""
    node.meta[_KEY] = made


def overrule(node: Node, why: str) -> None:
    """Note that what the rule asks could not be done as it stands, and why."""
    made = decision(node)
    if made is not None:
        decide(node, replace(made, overruled=why))


def keep_out_of_fp8(node: Node, why: str) -> None:
    """Note that the product runs in the 16 bits that its inputs were cast to, and why."""
    made = decision(node)
    if made is not None:
        decide(node, replace(made, overruled=f"not in fp8: {why}", not_fp8=why))


def inserted_for(node: Node) -> str | None:
    """Why fxamp inserted this cast; None for a node of the user's program."""
    why: str | None = node.meta.get(INSERTED)
    return why
