"""A custom torch.autograd.Function as data, and its source."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Function:
    """What its two methods do; names are those of its own code.

    ``inputs`` are tensors; ``number`` is whether one more follows, ``k``. ``lines`` compute ``outputs``. The Function
    saves ``saved``, sets attributes ``kept`` of its context, and then does ``notes``. ``gradients`` are expressions,
    one for each input, of what it saves and of the gradients of its outputs, :attr:`incoming`. ``apart``: whether
    ``setup_context`` saves; ``packed``: whether one output is returned as a tuple.
    """

    name: str
    inputs: tuple[str, ...]
    number: bool
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    kept: tuple[str, ...]
    notes: tuple[str, ...]
    gradients: tuple[str, ...]
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    apart: bool = False
    packed: bool = False

    @property
    def incoming(self) -> tuple[str, ...]:
        """The names of the gradients of the outputs."""
        return incoming(len(self.outputs))

    def source(self) -> str:
        """The class."""
        return "\n".join([f"class {self.name}(torch.autograd.Function):", *_indented(self._methods()), ""])

    def _methods(self) -> Iterator[str]:
        arguments = [*self.inputs, *["k"] * self.number]
        results = f"return {_tuple(self.outputs) if self.packed else ', '.join(self.outputs)}"
        if self.apart:
            yield from _method("forward", arguments, (*self.lines, results), self.forward)
            unpacked = (f"{_tuple(arguments)} = inputs", f"{_left(self.outputs, self.packed)} = output")
            yield from _method("setup_context", ["ctx", "inputs", "output"], (*unpacked, *self._saving()))
        else:
            yield from _method("forward", ["ctx", *arguments], (*self.lines, *self._saving(), results), self.forward)
        gradients = f"return {', '.join([*self.gradients, *['None'] * self.number])}"
        yield from _method("backward", ["ctx", *self.incoming], (*self._reading(), gradients), self.backward)

    def _saving(self) -> Iterator[str]:
        if self.saved:
            yield f"ctx.save_for_backward({', '.join(self.saved)})"
        for name in self.kept:
            yield f"ctx.{name} = {name}"
        yield from self.notes
        if not (self.saved or self.kept or self.notes):
            yield "pass"

    def _reading(self) -> Iterator[str]:
        if self.saved:
            yield f"{_tuple(self.saved)} = ctx.saved_tensors"
        for name in self.kept:
            yield f"{name} = ctx.{name}"


def incoming(count: int) -> tuple[str, ...]:
    """The names of the gradients of this many outputs."""
    return ("g", "h", "i")[:count]


def _method(name: str, arguments: Sequence[str], body: Sequence[str], decorators: Sequence[str] = ()) -> Iterator[str]:
    yield from ("@staticmethod", *decorators, f"def {name}({', '.join(arguments)}):")
    yield from _indented(body)


def _indented(lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)},)"


def _left(names: Sequence[str], packed: bool) -> str:
    return _tuple(names) if packed or len(names) > 1 else names[0]
