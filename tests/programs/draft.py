"""A program while it is being drawn.

Each statement is run under eager autocast as soon as it is drawn, so that shapes, dtypes and what autocast refuses are
known and not guessed: a statement that raises is left out, and the next is drawn.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from programs.program import Block, Declaration, Flavour, Line, Program, Statement, Text
from programs.render import HEADER

T = TypeVar("T")


class Unfit(Exception):
    """The statement being drawn finds nothing to work on, or autocast refuses it."""


class Draft:
    """Draws operands for statements, takes their lines, and runs them.

    ``values`` are the tensors in sight, by name, inputs included; parameters and buffers are reached through ``self``.
    """

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], lower: torch.dtype) -> None:
        self._draw = draw
        self.lower = lower
        self.kind = ""
        self.values: dict[str, torch.Tensor] = {}
        self._self = SimpleNamespace()
        self._declarations: list[Declaration] = []
        self._bodies: list[list[Statement]] = [[]]
        self._names = 0
        self._globals: dict[str, Any] = {"self": self._self}
        exec(HEADER, self._globals)

    def pick(self, options: Sequence[T]) -> T:
        """One of ``options``; failures shrink to the first."""
        if not options:
            raise Unfit
        chosen: T = self._draw(st.sampled_from(list(options)))
        return chosen

    def chance(self) -> bool:
        """Yes or no; failures shrink to no."""
        return self.pick((False, True))

    def value(self, fits: Callable[[torch.Tensor], bool] = lambda value: True, floating: bool = True) -> str:
        """The name of a value in sight, the latest first; of floating dtype unless told otherwise."""
        names = [name for name, v in self.values.items() if (v.is_floating_point() or not floating) and fits(v)]
        return self.pick(names[::-1])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def input(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> str:
        """A new input of the program."""
        grad = dtype.is_floating_point and self.pick((True, False))
        name = self._declare("x", "input", shape, dtype, grad)
        self.values[name] = _filled(shape, dtype).requires_grad_(grad)
        return name

    def parameter(self, *shape: int) -> str:
        """``self.w``: a parameter of that shape, an old one or a new one, which may be frozen or tied to an old one."""
        old = [d.name for d in self._declarations if d.role == "parameter" and d.shape == shape]
        if old and self.pick((True, False)):
            return f"self.{self.pick(old)}"
        grad = self.pick((True, True, True, False))
        tied = self.pick(old) if old and self.chance() else None
        name = self._declare("w", "parameter", shape, torch.float32, grad, tied)
        new = torch.nn.Parameter(_filled(shape, torch.float32), requires_grad=grad)
        setattr(self._self, name, new if tied is None else getattr(self._self, tied))
        return f"self.{name}"

    def buffer(self, *shape: int) -> str:
        """``self.b``: a buffer of that shape, an old one or a new one."""
        old = [d.name for d in self._declarations if d.role == "buffer" and d.shape == shape]
        if old and self.pick((True, False)):
            return f"self.{self.pick(old)}"
        name = self._declare("b", "buffer", shape, torch.float32, False)
        setattr(self._self, name, _filled(shape, torch.float32))
        return f"self.{name}"

    def let(self, code: str, **other: str) -> str:
        """Assign ``code`` to a new value; ``other`` are its texts in the flavours that differ."""
        name = self._fresh("h")
        self.do(f"{name} = {code}", **{flavour: f"{name} = {text}" for flavour, text in other.items()})
        return name

    def do(self, code: str, **other: str) -> None:
        """A statement without a value of its own."""
        scope: dict[str, Any] = dict(self.values)
        try:
            exec(code, self._globals, scope)
        except Exception as error:
            raise Unfit(str(error)) from error
        self.values.update({name: value for name, value in scope.items() if isinstance(value, torch.Tensor)})
        self._bodies[-1].append(Line(self.kind, _text(code, other)))

    @contextmanager
    def block(self, header: str, within: AbstractContextManager[Any], **other: str) -> Iterator[None]:
        """What is drawn inside becomes the body of ``header`` and runs ``within``; an empty body leaves nothing."""
        kind = self.kind
        self._bodies.append([])
        try:
            with within:
                yield
        finally:
            body = self._bodies.pop()
            if body:
                self._bodies[-1].append(Block(kind, _text(header, other), tuple(body)))

    def finish(self, results: Sequence[str]) -> Program:
        return Program(self.lower, tuple(self._declarations), tuple(self._bodies[0]), tuple(results))

    def _declare(self, letter: str, role: str, shape: tuple[int, ...], *rest: Any) -> str:
        name = f"{letter}{sum(d.role == role for d in self._declarations)}"
        self._declarations.append(Declaration(name, role, shape, *rest))
        return name

    def _fresh(self, letter: str) -> str:
        self._names += 1
        return f"{letter}{self._names - 1}"


def _text(code: str, other: dict[str, str]) -> Text:
    return Text(code, tuple((Flavour(flavour), text) for flavour, text in other.items()))


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if not dtype.is_floating_point:
        return torch.randint(2, shape, generator=generator)
    return torch.randn(shape, generator=generator).div(2).to(dtype)
