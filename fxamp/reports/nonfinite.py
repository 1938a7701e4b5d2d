"""The non-finite values in runs of compiled graphs, as plain data and as text, with the module path of each."""

from dataclasses import dataclass
from typing import Protocol

from fxamp.graph_text import Entry, RuleRef
from fxamp.graph_text.model import Source


@dataclass(frozen=True)
class Reading:
    """A value that an op read: the node's name, what it is, its dtype, and its largest magnitude; None if unknown."""

    node: str
    what: str
    dtype: str
    largest: float | None

    def __str__(self) -> str:
        largest = "unknown" if self.largest is None else f"{self.largest:.4g}"
        return f"{self.node} ({self.what}, {self.dtype}): largest magnitude {largest}"


@dataclass(frozen=True)
class NonFinite:
    """The first value in program order that was not finite, although its inputs were.

    ``kind`` is ``"op"``; or, for a value that entered the graph that way, ``"input"``, ``"parameter"``, ``"constant"``,
    ``"value saved by the forward"``, ``"value kept for the backward in fewer bits"`` or ``"gradient that enters the
    graph"``. ``region`` is "forward" or "backward", ``value`` "inf" or "nan". ``step`` is the number of the call of
    this graph, from 1, including evaluations and micro-batches; ``times`` is the number of calls in which this value
    was the first one, ``last`` the last of them. ``entry`` is the node with its op, module, source line and rule; in a
    backward ``forward`` is the node of the op whose gradient it computes, None if unknown. ``graph`` is the number of
    the graph in :func:`fxamp.report`.

    ``inputs`` are the values that the op read. ``before`` is the largest magnitude of the result in the last call in
    which everything was finite, None if there was none. ``casts`` are the casts that made its inputs 16-bit, with their
    rules. ``next_ops`` are the next ops that the value reached, ``gradients`` the parameters and other inputs whose
    gradients became non-finite. ``advice`` is a rule for a policy file that keeps the op in float32; ``""`` if it runs
    in float32 already. ``scaled``: gradients were multiplied by a loss scale, so an overflow is normal: the step is
    skipped, and the scale goes down.
    """

    entry: Entry
    kind: str
    region: str
    value: str
    step: int
    inputs: tuple[Reading, ...] = ()
    before: float | None = None
    casts: tuple[str, ...] = ()
    next_ops: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    advice: str = ""
    forward: Entry | None = None
    scaled: bool = False
    times: int = 1
    last: int = 0

    @property
    def node(self) -> str:
        """The name of the node."""
        return self.entry.name

    @property
    def op(self) -> str:
        """The op as policies name it, ``"aten::exp.default"``; for a value that enters the graph, its name."""
        return self.entry.target

    @property
    def module(self) -> str:
        """The dotted path of the module whose forward called the op."""
        return self._program.module

    @property
    def source(self) -> Source | None:
        """The line of the program that called the op."""
        return self._program.source

    @property
    def dtype(self) -> str:
        """The dtype of the value."""
        return self.entry.dtype

    @property
    def without_policy(self) -> str:
        """The dtype that the value would have without the policy; for a gradient, the dtype of its forward's op."""
        if self.entry.is_cast and self.inputs:
            return self.inputs[0].dtype
        known = self._program
        return known.was[0] if known.was and known.dtype == self.dtype else self.dtype

    @property
    def rule(self) -> RuleRef | None:
        """The rule that decided the op's dtype; None if it follows its inputs."""
        return self.entry.rule

    @property
    def _program(self) -> Entry:
        return self.forward or self.entry

    def __str__(self) -> str:
        rows = [(name, text) for name, text in self._rows() if text]
        return "\n".join([self.headline, *(f"  {name:<11}{text}" for name, text in rows)])

    @property
    def headline(self) -> str:
        """One line: the first value that was not finite, and the step."""
        what = self.op if self.kind == "op" else f"{self.kind} {self.op}"
        of = f" in the backward of {self.forward.target}" if self.forward is not None else ""
        where = "" if of or self.region == "forward" else " in the backward"
        scaled = ", of scaled gradients" if self.scaled else ""
        return f"step {self.step}: {what}{of}{where} is the first value that is not finite ({self.value}{scaled})"

    def _rows(self) -> list[tuple[str, str]]:
        program, entry = self._program, self.entry
        code = f"{program.source} in {program.source.function}: {program.source.code}" if program.source else ""
        inserted = f", a cast that fxamp inserted {entry.inserted}" if entry.inserted else ""
        rule = f"{self.rule.id} {self.rule.origin}".strip() if self.rule else ""
        other = "" if self.without_policy == self.dtype else f", {self.without_policy} without the policy"
        before = "" if self.before is None else f"the largest magnitude of the result was {self.before:.4g}"
        return [
            ("node", f"{entry.name}{inserted}"),
            ("inside", "not measured, so the whole op is named" if entry.target.startswith("higher_order::") else ""),
            ("source", code),
            ("module", f"{program.module} ({program.module_class})" if program.module else ""),
            ("dtype", f"{self.dtype}{other}"),
            ("rule", rule),
            *(("cast", cast) for cast in self.casts),
            *(("input", str(reading)) for reading in self.inputs),
            ("before", before),
            ("then", ", ".join(self.next_ops)),
            ("gradients", ", ".join(self.gradients)),
            ("try", self.advice.replace("\n", "\n" + " " * 13)),
        ]


class Account(Protocol):
    """Reads the measurements of one graph's runs."""

    def found(self) -> tuple[NonFinite, ...]:
        """Return the non-finite values found so far; waits for the device."""
