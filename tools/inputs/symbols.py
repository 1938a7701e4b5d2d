"""Convert symbolic sizes in a dump's text to SymInts of a separate ShapeEnv.

A dump contains ``s77``, but not the number that the program ran with. So each symbol gets a different hint, a multiple
of 64: a divisor of one hint usually divides a real size. Hints only affect conditions that the program tests while it
is traced (``if n > 1``), never a dtype.
"""

import ast
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxamp.tools.inputs.limits import require_small
from fxamp.tools.inputs.trusted import EXPRESSIONS
from fxamp.torch_private.parts.dynamo import ConstantSource

_HINT = 64

_CALLS: dict[str, Callable[..., Any]] = {
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "ToFloat": torch.sym_float,
    "TruncToInt": torch.sym_int,
    "floor": torch.sym_int,
    "PowByNatural": lambda a, b: a**b,
}

#: Operations that make large numbers of small ones, by their name in a size: their name for require_small.
_POWERS = {"Pow": "pow", "PowByNatural": "pow", "LShift": "lshift"}


class Symbols:
    """The symbols of one dump; each is created when it first occurs."""

    def __init__(self, unbacked: bool = False) -> None:
        """``unbacked``: the program was captured with numbers that depend on data (``u0``) in its graph."""
        self.shape_env = ShapeEnv(allow_scalar_outputs=unbacked, allow_dynamic_output_shape_ops=unbacked)
        self._values: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def value(self, text: str) -> Any:
        """Return the number that ``text`` (``"4*s77"``, ``"0.1"``) describes. Raises ValueError if it is unreadable.

        A number of more than 64 bits counts as unreadable.
        """
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"{text!r} is neither a number nor arithmetic on symbols") from error
        return self._of(tree, text)

    def original(self, text: str) -> str:
        """Return ``text`` with this environment's symbol names replaced by the dump's."""
        return re.sub(r"\b[a-z]+\d+\b", lambda match: self._names.get(match[0], match[0]), text)

    def fixed(self) -> list[str]:
        """Return the symbols that became their hints, because the program needed the number: ``"s77 as 64"``."""
        now = {name: str(self._values[name]) for name in self._values}
        return [f"{name} as {text}" for name, text in now.items() if text.isdecimal()]

    def _of(self, tree: ast.expr, text: str) -> Any:
        if isinstance(tree, ast.Constant) and isinstance(tree.value, (int, float, bool)):
            return tree.value
        if isinstance(tree, ast.Name):
            return self._symbol(tree.id)
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            return -self._of(tree.operand, text)
        if isinstance(tree, ast.BinOp):
            return self._arithmetic(tree, text)
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in _CALLS:
            operands = [self._of(argument, text) for argument in tree.args]
            require_small(_POWERS.get(tree.func.id, tree.func.id), operands)
            return _CALLS[tree.func.id](*operands)
        raise ValueError(f"{text!r} is neither a number nor arithmetic on symbols")

    def _arithmetic(self, tree: ast.BinOp, text: str) -> Any:
        left, right = self._of(tree.left, text), self._of(tree.right, text)
        name = type(tree.op).__name__
        require_small(_POWERS.get(name, name), (left, right))
        return EXPRESSIONS[name](left, right)

    def _symbol(self, name: str) -> Any:
        if name not in self._values:
            hint = _HINT * (len(self._values) + 1)
            source = ConstantSource(name)
            symbol = self.shape_env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            self._values[name] = self.shape_env.create_symintnode(symbol, hint=hint, source=source)
            self._names[str(symbol)] = name
        return self._values[name]
