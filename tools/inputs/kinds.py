"""Detect a file's kind from its content, without running it and without torch."""

import ast
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from fxamp.errors import ListingError, nearest
from fxamp.policy.file.paths import is_file, is_folder
from fxamp.tools.common.silence import one_line

ACCEPTED = (
    "a graph as text (GraphModule.print_readable, TORCH_COMPILE_DEBUG, tlparse, fxamp's dumps), fx_graph_runnable.py, "
    "a .pt2 of torch.export, a Python file with model and inputs"
)


def existing(path: str, accepted: str = ACCEPTED) -> str:
    """Return ``path`` if it is a file; raise ListingError, with ``accepted``, otherwise."""
    if is_folder(path):
        raise ListingError(f"{path} is a folder; accepted: {accepted}")
    if is_file(path):
        return path
    where = Path(path)
    if path and not path.endswith("/") and is_folder(where.parent) and where.exists():
        raise ListingError(f"{path} is a device or a pipe; accepted: {accepted}")
    siblings = [other.name for other in where.parent.iterdir()] if is_folder(where.parent) else []
    raise ListingError(f"{path or repr(path)} does not exist{nearest(where.name, siblings)}; accepted: {accepted}")


def kind_of(file: str) -> str:
    """Return the kind of a file: "graph", "runnable", "model" or "exported"."""
    with Path(file).open("rb") as stream:
        head = stream.read(4096)
    if head.startswith(b"PK\x03\x04") or (file.endswith(".pt2") and b"\0" in head):
        return "exported"
    if b"\0" in head or file.endswith(".pt2"):
        raise ListingError(f"{file}: it is neither text nor an archive of torch.export; accepted: {ACCEPTED}")
    tree = syntax(file)
    kind = "graph" if tree is None else _kind_of(tree)
    if kind == "model" and not file.endswith(".py"):
        raise ListingError(f"{file}: it holds a program, which is run if the name ends in .py; accepted: {ACCEPTED}")
    return kind


def syntax(file: str) -> ast.Module | None:
    """Return the syntax tree of a Python file; None for text that is not Python."""
    try:
        return _parsed(file)
    except UnicodeDecodeError as error:
        raise ListingError(f"{file}: it is not text in UTF-8; accepted: {ACCEPTED}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def program_syntax(file: str, accepted: str) -> ast.Module:
    """Return the syntax tree of a Python file that is to be run; raise ListingError, with ``accepted``, otherwise."""
    if not existing(file, accepted).endswith(".py"):
        raise ListingError(f"{file}: its name does not end in .py; accepted: {accepted}")
    try:
        return _parsed(file)
    except OSError as error:
        raise ListingError(f"{file}: {error.strerror}; accepted: {accepted}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ListingError(f"{file}: {one_line(error)}; accepted: {accepted}") from error


def _parsed(file: str) -> ast.Module:
    """Return the syntax tree of a file in the encoding that Python would read it in: UTF-8 or what the file says."""
    content, encoding = Path(file).read_bytes(), "utf-8"
    with suppress(SyntaxError):
        encoding, _ = tokenize.detect_encoding(BytesIO(content).readline)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(content.decode(encoding), file)


def _kind_of(tree: ast.Module) -> str:
    bound = bound_names(tree)
    if "load_args" in bound or ("Repro" in bound and "mod" in bound):
        return "runnable"
    if {"model", "inputs"} & bound:
        return "model"
    return "graph" if not tree.body or any(map(_is_graph, tree.body)) or not _is_program(tree) else "model"


def _is_graph(node: ast.stmt) -> bool:
    """Whether a statement is a graph's class without setup code, or a bare forward."""
    if isinstance(node, ast.FunctionDef):
        return node.name == "forward"
    methods = (
        {part.name for part in node.body if isinstance(part, ast.FunctionDef)} if isinstance(node, ast.ClassDef) else ()
    )
    return "forward" in methods and "__init__" not in methods


def _is_program(tree: ast.Module) -> bool:
    return any(isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)) for node in tree.body)


def bound_names(tree: ast.Module) -> set[str]:
    """Return the names that the statements of a file define outside functions and classes."""
    names: set[str] = set()
    for node in _top_level(tree.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        else:
            names |= {
                name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            }
    return names


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)) and not _is_main(node):
            for part in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(node, part, []))


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
