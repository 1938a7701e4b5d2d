"""Read the input types of Inductor's ``fx_graph_runnable.py`` from its function ``load_args``."""

import ast
from dataclasses import replace

from fxamp.errors import ListingError
from fxamp.graph_text.model import Listing, TensorType
from fxamp.graph_text.python import parse_quietly

#: Names of dtypes that are not shortened to a letter and a number, as ``float32`` is to ``f32``.
_DTYPES = {"bfloat16": "bf16", "bcomplex32": "bc32", "bool": "b8"}
_KINDS = {"complex": "c", "float": "f", "uint": "u", "int": "i"}

#: Reader calls that create one input each, but give no type.
_UNTYPED = frozenset({"const", "unsupported", "generator", "opaque"})


def input_types(listing: Listing, text: str, file: str) -> Listing:
    """Return ``listing`` with the input types from ``load_args`` in the whole file ``text``, in order.

    If there is no such function, for example because only a comment mentions it, return ``listing`` itself.

    Raises ListingError if the types do not match the inputs.
    """
    try:
        tree = parse_quietly(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ListingError(f"{file}:{line}: not a runnable graph: {error}; is it truncated?") from error
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "load_args")
    function = next(functions, None)
    if function is None:
        return listing
    try:
        inputs = _inputs(function)
    except RecursionError:
        raise ListingError(f"{file}:{function.lineno}: load_args is nested too deeply to be read") from None
    places = [at for at, entry in enumerate(listing.entries) if entry.kind == "placeholder"]
    if len(inputs) != len(places):
        raise ListingError(
            f"{file}:{function.lineno}: load_args reads {len(inputs)} inputs, but forward takes {len(places)}"
        )
    entries = list(listing.entries)
    for at, kind in zip(places, inputs, strict=True):
        if isinstance(kind, str):
            entries[at] = replace(entries[at], symbol=kind)
        elif kind is not None and not entries[at].values:
            entries[at] = replace(entries[at], values=(kind,))
    return replace(listing, entries=tuple(entries))


def _inputs(function: ast.FunctionDef) -> list[TensorType | str | None]:
    """Return the type or number of each ``reader.tensor`` and ``reader.symint`` call, in order."""
    devices: dict[str, str] = {}
    types: list[TensorType | str | None] = []
    for statement in function.body:
        call = getattr(statement, "value", None)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        kind = call.func.attr
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if kind == "storage" and isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            devices[statement.targets[0].id] = _device(keywords.get("device"))
        elif kind == "tensor":
            types.append(_tensor(call, keywords, devices))
        elif kind in ("symint", "symfloat", "symbool"):
            types.append(_symbol(call, keywords))
        elif kind in _UNTYPED:
            types.append(None)
    return types


def _tensor(call: ast.Call, keywords: dict[str | None, ast.expr], devices: dict[str, str]) -> TensorType | None:
    if len(call.args) < 2 or not isinstance(call.args[1], ast.Tuple):
        return None
    sizes = tuple(
        size.value if isinstance(size, ast.Constant) and isinstance(size.value, int) else ast.unparse(size)
        for size in call.args[1].elts
    )
    dtype = ast.unparse(keywords["dtype"]).removeprefix("torch.") if "dtype" in keywords else "float32"
    storage = call.args[0].id if isinstance(call.args[0], ast.Name) else ""
    return TensorType(_short(dtype), sizes, devices.get(storage, "cpu"))


def _symbol(call: ast.Call, keywords: dict[str | None, ast.expr]) -> str:
    """Return ``"s77"`` for ``symint(4, expr='s77')``; older writers give only the number."""
    expression = keywords.get("expr")
    if isinstance(expression, ast.Constant):
        return str(expression.value)
    return ast.unparse(call.args[0]) if call.args else ""


def _short(dtype: str) -> str:
    """Return ``"f8e4m3fn"`` for ``"float8_e4m3fn"``: the short name of a dtype in torch's printed graphs."""
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    for name, letter in _KINDS.items():
        if dtype.startswith(name):
            return letter + dtype.removeprefix(name).replace("_", "")
    return dtype


def _device(value: ast.expr | None) -> str:
    """Return ``"cuda:0"`` for ``device(type='cuda', index=0)``."""
    if not isinstance(value, ast.Call):
        return "cpu"
    parts = [
        part.value
        for part in [*value.args, *(keyword.value for keyword in value.keywords)]
        if isinstance(part, ast.Constant)
    ]
    return ":".join(str(part) for part in parts) or "cpu"
