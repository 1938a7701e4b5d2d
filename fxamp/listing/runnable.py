"""Inductor's ``fx_graph_runnable.py``: the types of the graph's inputs stand in its function ``load_args``."""

import ast
from dataclasses import replace

from fxamp.errors import ListingError
from fxamp.listing.model import Listing, TensorType

_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "complex64": "c64",
    "complex128": "c128",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "b8",
}


def input_types(listing: Listing, text: str, file: str) -> Listing:
    """``listing`` with the types that ``load_args`` of the whole file ``text`` gives to its inputs, in order.

    Without a function of that name, as where only a comment speaks of it, ``listing`` itself.

    Raises ListingError if they do not fit together.
    """
    try:
        tree = ast.parse(text)
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
    for at, given in zip(places, inputs, strict=True):
        if isinstance(given, str):
            entries[at] = replace(entries[at], symbol=given)
        elif given is not None and not entries[at].values:
            entries[at] = replace(entries[at], values=(given,))
    return replace(listing, entries=tuple(entries))


def _inputs(function: ast.FunctionDef) -> list[TensorType | str | None]:
    """What each ``reader.tensor`` and ``reader.symint`` call gives, in order."""
    devices: dict[str, str] = {}
    found: list[TensorType | str | None] = []
    for statement in function.body:
        call = getattr(statement, "value", None)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        kind = call.func.attr
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if kind == "storage" and isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            devices[statement.targets[0].id] = _device(keywords.get("device"))
        elif kind == "tensor":
            found.append(_tensor(call, keywords, devices))
        elif kind in ("symint", "symfloat", "symbool"):
            found.append(ast.unparse(call.args[0]) if call.args else "")
        elif kind in ("const_arg", "unsupported", "opaque"):
            found.append(None)
    return found


def _tensor(call: ast.Call, keywords: dict[str | None, ast.expr], devices: dict[str, str]) -> TensorType | None:
    if len(call.args) < 2 or not isinstance(call.args[1], ast.Tuple):
        return None
    sizes = tuple(
        size.value if isinstance(size, ast.Constant) and isinstance(size.value, int) else ast.unparse(size)
        for size in call.args[1].elts
    )
    dtype = ast.unparse(keywords["dtype"]).removeprefix("torch.") if "dtype" in keywords else "float32"
    storage = call.args[0].id if isinstance(call.args[0], ast.Name) else ""
    return TensorType(_DTYPES.get(dtype, dtype), sizes, devices.get(storage, "cpu"))


def _device(value: ast.expr | None) -> str:
    """``"cuda:0"`` for ``device(type='cuda', index=0)``."""
    if not isinstance(value, ast.Call):
        return "cpu"
    given = [
        part.value
        for part in [*value.args, *(keyword.value for keyword in value.keywords)]
        if isinstance(part, ast.Constant)
    ]
    return ":".join(str(part) for part in given) or "cpu"
