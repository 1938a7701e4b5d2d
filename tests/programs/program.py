"""A random program as data: what it declares, its statements in order, its results.

Every text is Python. Where eager autocast itself is no oracle for a statement, or torch.compile alone does not survive
it, the statement carries the text of that flavour beside its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from programs import device

from fxamp import Policy


class Flavour(Enum):
    """For whom a program is rendered."""

    #: The program as a user writes it; fxamp compiles this one.
    PROGRAM = "program"
    #: What runs under eager autocast and is right bit for bit.
    ORACLE = "oracle"
    #: What torch.compile takes without fxamp.
    ALONE = "alone"
    #: As for the oracle, but what a policy may compute in another order is in float64.
    EXACT = "exact"


@dataclass(frozen=True)
class Text:
    """One line of Python in every flavour; ``other`` holds those that differ from ``program``."""

    program: str
    other: tuple[tuple[Flavour, str], ...] = ()

    def of(self, flavour: Flavour) -> str:
        texts = dict(self.other)
        usual = texts.get(Flavour.ORACLE, self.program) if flavour is Flavour.EXACT else self.program
        return texts.get(flavour, usual)


@dataclass(frozen=True)
class Declaration:
    """What exists before the call: a tensor that is a parameter, a buffer or an input; or a module.

    ``tied`` names the parameter that this is. ``reversed_strides``: the first dimension varies fastest in memory.
    ``made`` is the expression of a module.
    """

    name: str
    role: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    grad: bool = False
    tied: str | None = None
    reversed_strides: bool = False
    made: str = ""


@dataclass(frozen=True)
class Line:
    """A statement of one line."""

    kind: str
    text: Text


@dataclass(frozen=True)
class Block:
    """A statement with a body: a ``with`` or a ``def``."""

    kind: str
    header: Text
    body: tuple["Statement", ...]


Statement = Line | Block


@dataclass(frozen=True)
class Program:
    """``lower`` is autocast's dtype; ``results`` are names of values, in the order in which they are returned.

    ``definitions`` are classes outside of the module, by name; one may use those before it. ``border``: how it takes
    inputs and gives results, of :data:`programs.border.BORDERS`.
    """

    lower: torch.dtype
    declarations: tuple[Declaration, ...]
    statements: tuple[Statement, ...]
    results: tuple[str, ...] = field(default=())
    definitions: tuple[tuple[str, str], ...] = ()
    border: str = "positions"

    def declared(self, role: str) -> tuple[Declaration, ...]:
        return tuple(declaration for declaration in self.declarations if declaration.role == role)

    def kinds(self) -> Iterator[str]:
        """The kind of every statement, those inside of blocks included."""
        return _kinds(self.statements)


def _kinds(statements: tuple[Statement, ...]) -> Iterator[str]:
    for statement in statements:
        yield statement.kind
        if isinstance(statement, Block):
            yield from _kinds(statement.body)


#: ``Setting.used`` of a loss that reads all results.
ALL = 2**16 - 1

#: How often a program is called, and when it goes backward.
SCHEDULES = {
    "once": "one call, one backward",
    "twice": "one call; the gradients are differentiated too",
    "again": "a second call and backward, which adds to the gradients",
    "together": "two calls before one backward",
    "larger": "a second call and backward with a larger first dimension",
    "forward": "no backward",
    "evaluated": "a call without gradients after the backward, outside of the ambient autocast",
    "apart": "a backward for each result that is used",
    "threads": "two threads call at once, each with inputs of its own",
    "train": "four steps of an optimizer",
    "rewritten": "one call of fxamp.rewrite's module, one backward",
    "restart": "the same, in a new process after the second: all state is saved and loaded",
}


#: A policy that cuts losses into chunks.
_CHUNKS = """\
extends = ["{}"]
[[rule]]
id = "losses-in-chunks"
ops = ["cross_entropy_loss"]
chunks = 2
gradients = "{}"
"""


@dataclass(frozen=True)
class Setting:
    """How a program is run.

    ``ambient``: the dtype comes from torch.autocast around the call, not from a policy. ``schedule``: see
    :data:`SCHEDULES`. ``scaled``: with a loss scaler and a step of an optimizer; ``factor`` multiplies the loss.
    ``used``: bit i says whether result i is part of the loss. ``own``: policy "auto", and the program's own regions say
    what is cast. ``chunks``: who makes the gradients of losses in chunks of two rows; "" without a rule that cuts them.
    ``compiled``: the optimizer's step is, and keeps its state as the program does, or in 8 bits ("compiled-lean").
    ``watched``: with option "nonfinite". ``parted``: the program breaks its graph, so that one backward is made of
    those of several calls. ``traced``: Dynamo traces ``torch.autograd.grad``. ``zeros``: a result that is not used gets
    zeros for its gradient, as AOTAutograd gives it, and not None. ``values``: which draw of the values it is run with.
    """

    lowering: str = "aot_eager"
    ambient: bool = False
    schedule: str = "once"
    scaled: bool = False
    factor: float = 1.0
    used: int = ALL
    own: bool = False
    chunks: str = ""
    compiled: str = ""
    watched: bool = False
    parted: bool = False
    traced: bool = False
    zeros: bool = False
    values: int = 0

    def uses(self, result: int) -> bool:
        """Whether the loss reads the result of that number."""
        return bool(self.used >> result & 1)

    @property
    def races(self) -> bool:
        """Whether ops with bodies race: torch traces those at each eager run, which patches modules in all threads."""
        return self.schedule == "threads" and self.lowering == "eager"

    def words(self) -> list[str]:
        """What counts in a summary."""
        some = {ALL: "all results used", 0: "no result used"}.get(self.used, "some results used")
        flags = [name for name in ("ambient", "own", "scaled", "chunks", "watched", "traced") if getattr(self, name)]
        return [self.lowering, self.schedule, some, *flags, *filter(None, [self.compiled])]

    def policy(self, lower: torch.dtype) -> str | Policy:
        """fxamp's policy for a program with that dtype."""
        text = self.policy_file(lower)
        return Policy.loads(text) if text else self._policy_name(lower)

    def policy_file(self, lower: torch.dtype) -> str:
        """The text of the policy's file; empty for one that is shipped."""
        return _CHUNKS.format(self._policy_name(lower), self.chunks) if self.chunks else ""

    def _policy_name(self, lower: torch.dtype) -> str:
        return "auto" if self.ambient or self.own else f"{device.current()}-{str(lower).removeprefix('torch.')}"


@dataclass(frozen=True)
class Case:
    """A program and how fxamp runs it."""

    program: Program
    setting: Setting
