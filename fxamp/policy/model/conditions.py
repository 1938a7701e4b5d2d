"""Conditions of a rule on one argument of a call: its value, or a tensor's dtype, rank, size or shape.

    dim = -1                                          the value
    approximate = "tanh"
    self = { dtype = "float32", size = ">4096" }      a tensor: every key must hold
    self = { shape = ["...", ">=128", 64] }           the sizes of the last two dimensions

A list of tensors meets a condition if one of them does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fxamp.errors import nearest
from fxamp.policy.model.comparisons import size_condition, size_meets
from fxamp.policy.model.site import Number, Plain, Site, Symbol, TensorFacts, Value, tensors_in

_REAL = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
DTYPES = (*_REAL, "complex64", "complex128", "bool", "uint8", "int8", "int16", "int32", "int64")
SHAPE = """a list of sizes: numbers, comparisons such as ">4096", "*" for any size, once "..." for any number of them"""


@dataclass(frozen=True)
class Mismatch:
    """Why a condition fails; ``unknown``: the reason is that the compiler does not know the fact."""

    why: str
    unknown: bool = False


@dataclass(frozen=True)
class ArgCondition:
    """A condition on one argument; fields that are None or empty are not checked. Create it with :meth:`of`.

    True, 1 and 1.0 are different values: conditions with them are not equal.
    """

    value: Plain | tuple[Plain, ...] | None = None
    dtype: tuple[str, ...] = ()
    rank: str = ""
    size: str = ""
    shape: tuple[str, ...] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArgCondition) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    @staticmethod
    def of(condition: object) -> "ArgCondition":
        """Return the condition that a policy file writes as a value or a table; raise ValueError if it is malformed."""
        if isinstance(condition, ArgCondition):
            return condition
        if not isinstance(condition, Mapping):
            return ArgCondition(value=_value(condition))
        if not condition or not condition.keys() <= CHECKS.keys():
            hint = next((nearest(str(key), CHECKS) for key in condition if key not in CHECKS), "")
            accepted = ", ".join(CHECKS)
            raise ValueError(f"{dict(condition)!r} is not a condition on an argument; accepted: {accepted}{hint}")
        return ArgCondition(**{key: CHECKS[key](value) for key, value in condition.items()})

    def content(self) -> object:
        """Return the condition as a policy file writes it."""
        if self.value is not None:
            return list(self.value) if isinstance(self.value, tuple) else self.value
        written: dict[str, object] = {"rank": self.rank, "size": self.size}
        if self.dtype:
            written["dtype"] = self.dtype[0] if len(self.dtype) == 1 else list(self.dtype)
        if self.shape is not None:
            written["shape"] = list(self.shape)
        return {key: written[key] for key in CHECKS if written.get(key) not in (None, "")}

    def words(self) -> str:
        """Return the condition as reports name it: ``"= -1"``, ``"has dtype float32, size >4096"``."""
        content = self.content()
        if not isinstance(content, Mapping):
            return f"= {content!r}"
        return f"has {', '.join(f'{key} {plain(value)}' for key, value in content.items())}"

    def mismatch(self, name: str, site: Site) -> Mismatch | None:
        """Return why the condition fails for the argument ``name`` of a call, or None if it holds."""
        if name not in site.args:
            why = f"argument {name!r} is not known" if site.partial else f"there is no argument {name!r}"
            return Mismatch(why, unknown=site.partial)
        value = site.args[name]
        if self.value is not None:
            return self._value_mismatch(name, value)
        tensors = tensors_in(value)
        if not tensors:
            return Mismatch(f"{name} is not a tensor")
        mismatches = [self._tensor_mismatch(name, tensor) for tensor in tensors]
        if None in mismatches:
            return None
        return next((o for o in mismatches if o is not None and o.unknown), mismatches[0])

    def _value_mismatch(self, name: str, value: Value) -> Mismatch | None:
        if isinstance(value, Symbol):
            return Mismatch(f"the value of {name} is not known ({value})", unknown=True)
        if _same(value, self.value) or (isinstance(value, tuple) and len(value) == 1 and _same(value[0], self.value)):
            return None
        text = "a tensor" if isinstance(value, TensorFacts) else _shown(value)
        return Mismatch(f"{name} is {text}, not {_shown(self.value)}")

    def _tensor_mismatch(self, name: str, tensor: TensorFacts) -> Mismatch | None:
        if self.dtype and not tensor.dtype:
            return Mismatch(f"the dtype of {name} is not known", unknown=True)
        if self.dtype and tensor.dtype not in self.dtype:
            return Mismatch(f"{name} is {tensor.dtype}, not {' or '.join(self.dtype)}")
        if self.rank and (why := number_mismatch(f"the rank of {name}", tensor.rank, self.rank)):
            return why
        if self.size and (why := number_mismatch(f"the size of {name}", tensor.size, self.size)):
            return why
        return None if self.shape is None else _shape_mismatch(name, tensor.shape, self.shape)


def plain(value: object) -> str:
    """Return ``"==64"`` as 64, and a list as in TOML but without quotes."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(plain, value))}]"
    return str(value).removeprefix("==")


def number_mismatch(what: str, number: Number | None, condition: str) -> Mismatch | None:
    """Return why a number fails a size condition, or None; a symbolic or missing number always fails."""
    if not isinstance(number, int):
        return Mismatch(f"{what} is not known{'' if number is None else f' ({number})'}", unknown=True)
    return None if size_meets(condition, number) else Mismatch(f"{what} is {number}, not {condition}")


def _shape_mismatch(name: str, shape: tuple[Number, ...] | None, sizes: tuple[str, ...]) -> Mismatch | None:
    if shape is None:
        return Mismatch(f"the shape of {name} is not known", unknown=True)
    written = f"[{', '.join(sizes)}]"
    named = [size for size in sizes if size != "..."]
    if len(shape) < len(named) or ("..." not in sizes and len(shape) > len(named)):
        return Mismatch(f"the shape of {name} has {len(shape)} dimensions, which does not fit {written}")
    front = sizes.index("...") if "..." in sizes else len(sizes)
    dimensions = [*range(front), *range(len(shape) - (len(named) - front), len(shape))]
    for at, condition in zip(dimensions, named, strict=True):
        if condition != "*" and (why := number_mismatch(f"size {at} of {name}", shape[at], condition)):
            return why
    return None


def _same(one: object, other: object) -> bool:
    """Return whether two values are equal; True does not equal 1."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value)


def _value(value: object) -> Plain | tuple[Plain, ...]:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(item, (bool, int, float, str)) for item in value):
        return tuple(value)
    raise ValueError(f"{value!r} is not a value; accepted: a number, a string, true or false, or a list of them")


def _dtypes(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names:
        raise ValueError(f"dtype = {value!r} has the wrong type; accepted: a name, or a list of names")
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"dtype {name!r} is unknown; accepted: {', '.join(DTYPES)}{nearest(str(name), DTYPES)}")
    return tuple(sorted(set(names)))


def _shape(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or list(value).count("...") > 1:
        raise ValueError(f"shape = {value!r} is not a shape; accepted: {SHAPE}")
    return tuple(size if size in ("*", "...") else size_condition(size) for size in value)


CHECKS: dict[str, Callable[[Any], Any]] = {
    "dtype": _dtypes,
    "rank": size_condition,
    "size": size_condition,
    "shape": _shape,
}
"""The function that parses each key of a condition's table; all raise ValueError."""
