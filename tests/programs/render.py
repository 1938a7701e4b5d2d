"""A program as Python source, in the flavour of whoever runs it, and that source as a module.

Dynamo reads the source of what it compiles, so it is entered into :mod:`linecache`, from where tracebacks and fxamp's
messages quote it too.
"""

import itertools
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from programs import device
from programs.border import BORDERS
from programs.program import Block, Case, Declaration, Flavour, Program, Statement
from torch import Tensor, nn

_IMPORTS = """\
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
"""

#: Registers ``torch.ops.programs``.
_OPS = "import programs.custom_ops\n"

_HELPERS = "from programs.lowered import Lowered, exactly\n"

#: All that programs refer to.
PRELUDE = _IMPORTS + _OPS

_FOOTER = """\
import fxamp


def run(compiled):
    torch.manual_seed(0)
    module = Program()
    inputs = make_inputs()
    options = {options}
    call = torch.compile(module, backend="fxamp", options=options) if compiled else module
    positional, named = arguments(*inputs)
    with torch.autocast("cpu", {lower}, enabled={around}):
        results = tensors(call(*positional, **named))
    sum((r.float().square().sum() for r in results if r.requires_grad), torch.zeros((), requires_grad=True)).backward()
    return results, [t.grad for t in (*module.parameters(), *inputs) if t.is_leaf]


for ours, theirs in zip(run(compiled=True), run(compiled=False)):
    for a, b in zip(ours, theirs):
        print("None", a, b) if a is None or b is None else print((a.float() - b.float()).abs().max().item())
"""

_numbers = itertools.count()


def source(program: Program, flavour: Flavour = Flavour.PROGRAM) -> str:
    """The imports, a module class ``Program``, and ``make_inputs``, which returns its inputs as a list.

    ``arguments`` of the inputs are those of a call, positional and by name; ``tensors`` of what it returns are its
    results.
    """
    body = "\n".join(["", *_class(program, flavour), "", "", *_inputs(program), "", "", *_call(program), ""])
    used = ""
    for name, text in reversed(program.definitions):
        if re.search(rf"\b{name}\b", used + body):
            used = f"\n\n{text}{used}"
    oracle = _HELPERS if flavour in (Flavour.ORACLE, Flavour.EXACT) else ""
    ops = _OPS if "torch.ops.programs" in body else ""
    return device.moved("".join([_IMPORTS, ops, oracle, used, "\n", body]))


def script(case: Case) -> str:
    """A file that runs in this folder: the program under eager autocast and through fxamp, and what differs."""
    lower = case.program.lower
    file = case.setting.policy_file(lower)
    policy = f"fxamp.Policy.loads({file!r})" if file else repr(case.setting.policy(lower))
    watched = ', "nonfinite": "log"' if case.setting.watched else ""
    options = f'{{"policy": {policy}, "lowering": "{case.setting.lowering}"{watched}}}'
    footer = _FOOTER.format(lower=lower, options=options, around=_around(case))
    where = "" if device.current() == "cpu" else f'torch.set_default_device("{device.current()}")\n\n\n'
    return f"# {case.setting}\n{source(case.program)}\n\n{where}{device.moved(footer)}"


def _around(case: Case) -> str:
    """Whether autocast is around the call, as an expression."""
    return "False" if case.setting.own else "True" if case.setting.ambient else "not compiled"


def load(program: Program, flavour: Flavour = Flavour.PROGRAM) -> dict[str, Any]:
    """The namespace of the executed source, whose lines :mod:`inspect` finds, and which is a module of its own."""
    text = source(program, flavour)
    number = next(_numbers)
    filename = f"<random {flavour.value} {number}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module = ModuleType(f"random_{flavour.value}_{number}")
    sys.modules[module.__name__] = module  # Dynamo imports it to find its globals
    exec(compile(text, filename, "exec"), vars(module))
    return vars(module)


@dataclass(frozen=True)
class Built:
    """A program's module and its inputs; ``namespace`` is that of its source."""

    module: nn.Module
    inputs: list[Tensor]
    namespace: Mapping[str, Any]

    @property
    def positional(self) -> tuple[Any, ...]:
        """The arguments of a call that has none by name."""
        positional: tuple[Any, ...] = self.namespace["arguments"](*self.inputs)[0]
        return positional

    def flat(self, module: Callable[..., Any]) -> Callable[..., list[Tensor]]:
        """``module`` as a function of the inputs, one by one, that returns a list of the results."""

        def call(*inputs: Tensor) -> list[Tensor]:
            positional, named = self.namespace["arguments"](*inputs)
            results: list[Tensor] = self.namespace["tensors"](module(*positional, **named))
            return results

        return call


def build(program: Program, flavour: Flavour = Flavour.PROGRAM, draw: int = 0) -> Built:
    """The program; values depend on ``draw`` and are alike for all flavours."""
    namespace = load(program, flavour)
    torch.manual_seed(draw)
    module = namespace["Program"]()
    return Built(module, namespace["make_inputs"](), namespace)


def larger(inputs: list[Tensor]) -> list[Tensor]:
    """The inputs with two more rows each."""
    with torch.no_grad():
        longer = [torch.cat([value, value[:2]]) if value.dim() else value.clone() for value in inputs]
    return [value.requires_grad_(given.requires_grad) for value, given in zip(longer, inputs, strict=True)]


def _class(program: Program, flavour: Flavour) -> Iterator[str]:
    border, names = BORDERS[program.border], _names(program)
    yield from border.classes(names, program.results)
    yield "class Program(nn.Module):"
    yield "    def __init__(self):"
    yield "        super().__init__()"
    for declaration in program.declarations:
        if declaration.role != "input":
            yield f"        {_member(declaration)}"
    yield ""
    yield f"    def forward({border.written(border.parameters, names)}):"
    if border.reading and names:
        yield f"        {border.written(border.reading, names)}"
    if flavour in (Flavour.ORACLE, Flavour.EXACT):
        yield "        lowered = Lowered()"
    for statement in program.statements:
        yield from rendered(statement, flavour, " " * 8)
    yield f"        return {border.written(border.returned, program.results)}"


def _names(program: Program) -> list[str]:
    return [declaration.name for declaration in program.declared("input")]


def _call(program: Program) -> Iterator[str]:
    border, names = BORDERS[program.border], _names(program)
    yield f"def arguments({', '.join(names)}):"
    arguments = border.written(border.arguments, names)
    yield f"    return (lambda *given, **named: (given, named))({arguments})"
    yield from ("", "", "def tensors(results):", f"    return list({border.tensors})")


def rendered(statement: Statement, flavour: Flavour, indent: str = "") -> Iterator[str]:
    """The lines of one statement."""
    if not isinstance(statement, Block):
        yield indent + statement.text.of(flavour)
        return
    yield indent + statement.header.of(flavour)
    for inner in statement.body:
        yield from rendered(inner, flavour, indent + "    ")


def _member(declaration: Declaration) -> str:
    if declaration.role == "module":
        return f"self.{declaration.name} = {declaration.made}"
    if declaration.tied is not None:
        return f"self.{declaration.name} = self.{declaration.tied}"
    values = _values(declaration)
    if declaration.role == "buffer":
        return f'self.register_buffer("{declaration.name}", {values})'
    return f"self.{declaration.name} = nn.Parameter({values}{'' if declaration.grad else ', requires_grad=False'})"


def _inputs(program: Program) -> Iterator[str]:
    yield "def make_inputs():"
    lines = [
        _values(declaration) + (".requires_grad_()" if declaration.grad else "")
        for declaration in program.declared("input")
    ]
    yield f"    return [{', '.join(lines)}]"


def _values(declaration: Declaration) -> str:
    """Normal numbers of half the usual size."""
    shape = declaration.shape[::-1] if declaration.reversed_strides else declaration.shape
    size = "".join(f"{length}, " for length in shape)
    if declaration.dtype.is_complex:
        return f"torch.randn(({size}), dtype={declaration.dtype}).div(2)"
    if not declaration.dtype.is_floating_point:
        return f"torch.randint(2, ({size})).to({declaration.dtype})"
    drawn = f"torch.randn(({size})).div(2)"
    if declaration.reversed_strides:
        drawn += f".permute({tuple(reversed(range(len(shape))))})"
    if declaration.dtype is not torch.float32:
        drawn += f".to({declaration.dtype})"
    return drawn
