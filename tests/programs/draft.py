"""A program while it is being drawn.

Each statement is run as soon as it is drawn, under eager autocast and, where Dynamo will capture the program without
autocast, in float32 too. So shapes, dtypes and what is refused are known and not guessed: a statement that raises is
left out, and the next is drawn.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from programs.lowered import marked, unmarked
from programs.place import Place, Side
from programs.program import Block, Case, Declaration, Flavour, Line, Program, Setting, Statement, Text
from programs.render import rendered
from torch import Tensor

T = TypeVar("T")
Draw = Callable[[st.SearchStrategy[Any]], Any]
Kinds = Mapping[str, Callable[["Draft"], None]]

#: How deep blocks are nested.
_DEEPEST = 2

#: How many kinds are tried for one statement.
_TRIALS = 3


class Unfit(Exception):
    """The statement being drawn finds nothing to work on, or is refused."""


class Draft:
    """Draws operands for statements, takes their lines, and runs them."""

    def __init__(
        self, draw: Draw, kinds: Kinds, weights: Mapping[str, int], lower: torch.dtype, setting: Setting
    ) -> None:
        self._draw = draw
        self._kinds = kinds
        self._names_of_kinds = [name for name in kinds for _ in range(weights[name])]
        self.lower = lower
        self.setting = setting
        self.place = Place()
        self._kind = ""
        self._drawn: set[str] = set()
        outermost = None if setting.own else lower
        self._sides = [Side(outermost)] if setting.ambient or setting.own else [Side(lower), Side(None)]
        self._declarations: list[Declaration] = []
        self._definitions: dict[str, str] = {}
        self._bodies: list[list[Statement]] = [[]]
        self._names = 0
        self._read: set[str] = set()
        #: Whether the sizes of a value may depend on other values.
        self.sizes_vary = False
        #: The weights of nested regions, by the names under which they were declared first.
        self.region_weights: list[str] = []

    def first(self, kind: str) -> None:
        """Draw a statement of that kind, if it fits."""
        self._kind = kind
        with suppress(Unfit):
            self._kinds[kind](self)
        self._kind = ""

    def statement(self) -> None:
        """Draw one statement, or none where nothing of what was drawn fits."""
        around = self._kind
        for _ in range(_TRIALS):
            self._kind = self.pick(self._names_of_kinds)
            try:
                self._kinds[self._kind](self)
                self._drawn.add(self._kind)
                break
            except Unfit:
                continue
        self._kind = around

    # What statements draw.

    def once(self) -> None:
        """Let this kind be drawn once in a program: for what takes long."""
        if self._kind in self._drawn:
            raise Unfit

    def pick(self, options: Sequence[T]) -> T:
        """One of ``options``; failures shrink to the first."""
        if not options:
            raise Unfit
        chosen: T = self._draw(st.sampled_from(list(options)))
        return chosen

    def chance(self, of: int = 2) -> bool:
        """Yes once in ``of`` times; failures shrink to no."""
        return self.pick((*[False] * (of - 1), True))

    @property
    def values(self) -> dict[str, Tensor]:
        """The tensors in sight as they are under autocast, by name, inputs included."""
        return self._sides[0].values()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def value(self, fits: Callable[[Tensor], bool] = lambda value: True, floating: bool = True) -> str:
        """The name of a value in sight, the latest two most often; of floating dtype unless told otherwise."""
        names = [name for name, v in self.values.items() if (v.is_floating_point() or not floating) and fits(v)][::-1]
        return self.pick(names[:2] * (len(names) // 3) + names)

    def ranked(self, *ranks: int) -> str:
        """The name of a floating value with that many dimensions."""
        return self.value(lambda v: v.dim() in ranks)

    def alike(self, name: str) -> str:
        """The name of a floating value of the same shape, perhaps the same."""
        shape = self.shape(name)
        return self.value(lambda v: tuple(v.shape) == shape)

    def share_memory(self, a: str, b: str) -> bool:
        return self.values[a].untyped_storage()._cdata == self.values[b].untyped_storage()._cdata

    def writable(self, least: int = 0) -> str:
        """The name of a floating value of ``least`` dimensions that may be written to: in a body, one made there."""
        values = self.values
        outside = {values[name].untyped_storage()._cdata for name in self.place.outer if name in values}
        return self.value(lambda v: v.dim() >= least and v.untyped_storage()._cdata not in outside)

    def input(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, reversed_strides: bool = False) -> str:
        """A new input of the program."""
        may = dtype.is_floating_point and not self.setting.scaled  # fxamp checks gradients of inputs too
        grad = may and self.pick((True, True, False))
        name = self._count("x", "input")
        return self._declare(Declaration(name, "input", shape, dtype, grad, reversed_strides=reversed_strides))

    def parameter(self, *shape: int, dtype: torch.dtype = torch.float32) -> str:
        """``self.w``: a parameter of that shape, an old one or a new one, which may be frozen or tied to an old one."""
        known = [d for d in self._declarations if d.role == "parameter"]
        old = [d.name for d in known if (d.shape, d.dtype) == (shape, dtype)]
        if old and self.pick((True, False)):
            return f"self.{self.pick(old)}"
        tied = self.pick(old) if old and self.chance(3) else None
        grad = not self.chance(4)
        name = self._count("w", "parameter")
        return f"self.{self._declare(Declaration(name, 'parameter', shape, dtype, grad, tied))}"

    @property
    def parameters(self) -> list[str]:
        """``self.w`` of all parameters so far."""
        return [f"self.{d.name}" for d in self._declarations if d.role == "parameter"]

    def first_name(self, parameter: str) -> str:
        """The name under which a parameter was declared first: ``parameter`` may be tied to it."""
        tied = {f"self.{d.name}": d.tied for d in self._declarations if d.tied is not None}
        return self.first_name(f"self.{tied[parameter]}") if parameter in tied else parameter

    def buffer(self, *shape: int) -> str:
        """``self.b``: a buffer of that shape, an old one or a new one."""
        old = [d.name for d in self._declarations if d.role == "buffer" and d.shape == shape]
        if old and self.pick((True, False)):
            return f"self.{self.pick(old)}"
        return f"self.{self._declare(Declaration(self._count('b', 'buffer'), 'buffer', shape))}"

    def module(self, made: str) -> str:
        """``self.m``: a new module, which the expression ``made`` makes."""
        return f"self.{self._declare(Declaration(self._count('m', 'module'), 'module', made=made))}"

    def weight(self, *shape: int) -> str:
        """A parameter as an operand of an op that autocast lowers."""
        return self.lowered(self.parameter(*shape))

    def lowered(self, name: str) -> str:
        """``name`` as an operand of an op that autocast lowers: what eager autocast caches the casts of."""
        return f"lowered({name})"

    # What statements write.

    def let(self, code: str, **other: str) -> str:
        """Assign ``code`` to a new value; ``other`` are its texts in the flavours that differ."""
        return self.let_several(code, 1, **other)[0]

    def let_several(self, code: str, count: int, **other: str) -> list[str]:
        """Assign the ``count`` results of ``code``."""
        names = [self.fresh("h") for _ in range(count)]
        left = ", ".join(names)
        self.do(f"{left} = {code}", **{flavour: f"{left} = {text}" for flavour, text in other.items()})
        return names

    def do(self, code: str, **other: str) -> None:
        """A statement without a value of its own. What is run here is its text for the oracle."""
        texts = {"oracle": code, **other}
        self._run(unmarked(texts["oracle"]))
        self._read |= set(_NAME.findall(code.partition(" = ")[2] or code))
        texts = {flavour: unmarked(text) for flavour, text in texts.items() if flavour != "oracle"} | {
            "oracle": marked(texts["oracle"], self.place, None if self.setting.own else self.lower)
        }
        self._bodies[-1].append(Line(self._kind, _text(unmarked(code), texts)))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What is drawn inside is left out altogether if some of it is refused."""
        body, before = self._bodies[-1], [side.names() for side in self._sides]
        length = len(body)
        try:
            yield
        except Unfit:
            del body[length:]
            self._go_back_to(before)
            raise

    @property
    def definitions(self) -> list[str]:
        """The names of all classes besides the module."""
        return list(self._definitions)

    def define(self, name: str, source: str) -> None:
        """A class besides the module."""
        self._definitions[name] = source
        for side in self._sides:
            side.define(name, source)

    def differentiate(self, *names: str) -> None:
        """Refuse values whose backward raises."""
        try:
            for side in self._sides:
                side.differentiate(names)
        except Exception as error:
            raise Unfit(str(error)) from error

    @contextmanager
    def block(self, header: str, place: Place, **other: str) -> Iterator[None]:
        """What is drawn inside becomes the body of ``header``, which stands at ``place``; an empty one is left out."""
        kind, outside = self._kind, self.place
        if outside.depth == _DEEPEST:
            raise Unfit
        self._bodies.append([])
        self.place = replace(place, depth=outside.depth + 1)
        try:
            with self.whole():
                yield
        finally:
            self.place = outside
            body = self._bodies.pop()
            if body:
                self._bodies[-1].append(Block(kind, _text(header, other), tuple(body)))

    @contextmanager
    def function(self, name: str, arguments: Mapping[str, str], place: Place | None = None) -> Iterator[None]:
        """What is drawn inside becomes a function of ``arguments`` (own name to outer name), and goes out of sight.

        ``place``: where its statements stand; unless given, in a body of its own.
        """
        place = place or replace(self.place, body=name, outer=frozenset(self.values) | frozenset(arguments))
        before = [side.names() for side in self._sides]
        try:
            self._run("\n".join(f"{own} = {value}" for own, value in arguments.items()))
            with self.block(f"def {name}({', '.join(arguments)}):", place):
                yield
        finally:
            self._go_back_to(before)
        self._run("\n".join(rendered(self._bodies[-1][-1], Flavour.PROGRAM)))

    def give(self, *results: str) -> None:
        """Return from the function that is being drawn."""
        self._bodies[-1].append(Line(self._kind, Text(f"return {', '.join(results)}")))

    def statements(self, most: int, usual: int = 2) -> None:
        """One to ``most`` statements, about ``usual`` on average."""
        for _ in range(most):
            self.statement()
            if not self.pick((False, *[True] * (usual - 1))):
                return

    def statements_without(self, kinds: Collection[str], most: int, usual: int) -> None:
        """As :meth:`statements`, without those of ``kinds``."""
        names = self._names_of_kinds
        self._names_of_kinds = [name for name in names if name not in kinds]
        self.statements(most, usual)
        self._names_of_kinds = names

    def fresh(self, letter: str) -> str:
        self._names += 1
        return f"{letter}{self._names - 1}"

    def unread(self) -> list[str]:
        """The values in sight that no statement reads, the latest first."""
        return [name for name in self.values if name not in self._read][::-1]

    def finish(self, results: Sequence[str], border: str) -> Case:
        """The program, whose results cross the border so."""
        program = Program(
            self.lower,
            tuple(self._declarations),
            tuple(self._bodies[0]),
            tuple(results),
            tuple(self._definitions.items()),
            border,
        )
        return Case(program, self.setting)

    def described(self, name: str) -> tuple[object, ...]:
        """The shape of a value, and its dtype and strides on every side."""
        values = [side.values()[name] for side in self._sides]
        return *self.shape(name), *((value.dtype, value.stride(), value.requires_grad) for value in values)

    def captured_dtype(self, name: str) -> torch.dtype:
        """The dtype of a value where Dynamo captures it."""
        return self._sides[-1].values()[name].dtype

    def _run(self, code: str) -> None:
        before = [side.names() for side in self._sides]
        try:
            for side in self._sides:
                side.run(code, self.place)
        except Exception as error:
            self._go_back_to(before)
            raise Unfit(str(error)) from error

    def _go_back_to(self, names: Sequence[dict[str, Any]]) -> None:
        for side, known in zip(self._sides, names, strict=True):
            side.go_back_to(known)

    def _declare(self, declaration: Declaration) -> str:
        self._declarations.append(declaration)
        for side in self._sides:
            side.declare(declaration)
        return declaration.name

    def _count(self, letter: str, role: str) -> str:
        return f"{letter}{sum(d.role == role for d in self._declarations)}"


_NAME = re.compile(r"\b[a-z]+[0-9]+\b")


def _text(code: str, other: Mapping[str, str]) -> Text:
    return Text(code, tuple((Flavour(flavour), text) for flavour, text in other.items() if text != code))
