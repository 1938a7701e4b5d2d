"""Every input of fxamp-show as a Document: what it is, is told by its content.

    graph text              read; with a policy it is rebuilt on FakeTensors, none of it is run
    fx_graph_runnable.py    the same; its intermediate types are found on FakeTensors; run only if trusted
    model.py                run, to get the model and its inputs; the model is traced on FakeTensors
    .pt2                    loaded by torch.export

Torch is imported where it is needed, not here.
"""

import ast
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fxamp.errors import ListingError, nearest
from fxamp.listing import Document, Listing
from fxamp.tools.show.apply import Request, choose, is_lowered, refuse
from fxamp.tools.show.quiet import in_one_line, quiet

if TYPE_CHECKING:
    from fxamp.tools.show.prepare import Prepared

__all__ = ["Request", "load", "prepare"]

ACCEPTED = (
    "a graph as text (GraphModule.print_readable, TORCH_COMPILE_DEBUG, tlparse, fxamp's dumps), fx_graph_runnable.py, "
    "a .pt2 of torch.export, a Python file with model and inputs"
)


def load(path: str, request: Request) -> Document:
    """Read ``path``. Text is only read unless ``request`` names a policy or a device.

    Raises ListingError, OptionError, PolicyError or BannedOpError with one line that says what is wrong and where.
    """
    file = _existing(path)
    kind = _kind(file)
    if kind == "graph" and request.plain:
        return _read(file)
    if kind == "runnable" and request.plain and not request.trust:
        return _with_values(_read(file), file)
    prepared = prepare(path, request)
    graphs: list[Listing] = []
    notes: list[str] = []
    for one in prepared:
        policy, why = choose(request, one.device)
        with quiet(), in_one_line(f"{file}: {one.name} cannot be rewritten"):
            graphs.append(one.listing(policy, why))
        notes += one.warnings
    return Document(tuple(graphs), tuple(dict.fromkeys(notes)))


def prepare(path: str, request: Request) -> "list[Prepared]":
    """The captured graphs of ``path``, to which policies can be applied one after another.

    Raises ListingError; among others for a graph that no policy can be applied to.
    """
    file = _existing(path)
    with quiet(), in_one_line(f"{file}: its graphs cannot be rebuilt"):
        return _PREPARE[_kind(file)](file, request)


def _existing(path: str) -> str:
    where = Path(path)
    if where.is_dir():
        raise ListingError(f"{path} is a folder; accepted: {ACCEPTED}")
    if not where.exists():
        siblings = [other.name for other in where.parent.iterdir()] if where.parent.is_dir() else []
        raise ListingError(f"{path} does not exist{nearest(where.name, siblings)}; accepted: {ACCEPTED}")
    return path


def _kind(file: str) -> str:
    """What a file is: "graph", "runnable", "model" or "exported"."""
    with Path(file).open("rb") as stream:
        head = stream.read(4096)
    if head.startswith(b"PK\x03\x04") or (file.endswith(".pt2") and b"\0" in head):
        return "exported"
    if b"\0" in head or file.endswith(".pt2"):
        raise ListingError(f"{file}: it is neither text nor an archive of torch.export; accepted: {ACCEPTED}")
    tree = _syntax(file)
    return "graph" if tree is None else _kind_of(tree)


def _syntax(file: str) -> ast.Module | None:
    """The syntax of a Python file; None for text that is not Python."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ListingError(f"{file}: it is not text in UTF-8; accepted: {ACCEPTED}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _kind_of(tree: ast.Module) -> str:
    from fxamp.tools.show.model_file import bound_names, pair_functions

    bound = bound_names(tree)
    if "load_args" in bound or ("Repro" in bound and "mod" in bound):
        return "runnable"
    if {"model", "inputs"} & bound or pair_functions(tree):
        return "model"
    return "graph" if not tree.body or any(map(_is_graph, tree.body)) or not _is_program(tree) else "model"


def _is_graph(node: ast.stmt) -> bool:
    """Whether a statement is a graph's class, which sets nothing up; or the forward alone."""
    if isinstance(node, ast.FunctionDef):
        return node.name == "forward"
    methods = (
        {part.name for part in node.body if isinstance(part, ast.FunctionDef)} if isinstance(node, ast.ClassDef) else ()
    )
    return "forward" in methods and "__init__" not in methods


def _is_program(tree: ast.Module) -> bool:
    return any(isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)) for node in tree.body)


def _read(file: str) -> Document:
    from fxamp.listing.parse import read_file

    return read_file(file)


def _with_values(document: Document, file: str) -> Document:
    """``document`` with the types that a runnable's text does not hold."""
    from fxamp.tools.show.build import fill_values

    with quiet(), in_one_line(f"{file}: the types of its values cannot be found"):
        graphs = [fill_values(listing, file) for listing in document.graphs]
    return replace(document, graphs=tuple(graphs))


def _prepare_text(file: str, request: Request) -> "list[Prepared]":
    from fxamp.tools.show.build import prepare_listing

    document = _read(file)
    for listing in document.graphs:
        refuse(listing, file)
    prepared = [prepare_listing(listing, file) for listing in document.graphs]
    notes = [
        *document.warnings,
        *(_LOWERED.format(file, listing.name) for listing in document.graphs if is_lowered(listing)),
    ]
    return [replace(one, warnings=(*one.warnings, *notes)) for one in prepared]


_LOWERED = (
    "{}: {} is at AOTAutograd's level, where linear, layer_norm, cross_entropy and others are decomposed; fxamp "
    "decides before that, so its own choices may differ"
)


def _prepare_runnable(file: str, request: Request) -> "list[Prepared]":
    if not request.trust:
        return _prepare_text(file, request)
    from fxamp.tools.show.executed import run_runnable

    return [run_runnable(file, _notice(request))]


def _prepare_model(file: str, request: Request) -> "list[Prepared]":
    from fxamp.tools.show.model_file import program

    tree = _syntax(file)
    assert tree is not None
    found = program(file, tree, _notice(request))
    from fxamp.tools.show.collect import collect

    graphs = collect(found, file, _notice(request))
    if not graphs:
        raise ListingError(f"{file}: Dynamo makes no graph of model(inputs): nothing of it would be compiled")
    return graphs


def _prepare_exported(file: str, request: Request) -> "list[Prepared]":
    from fxamp.tools.show.exported import prepare_exported

    return [prepare_exported(file, request.trust)]


def _notice(request: Request) -> Callable[[str], None]:
    return lambda text: print(f"{request.prog}: {text}", file=sys.stderr)


_PREPARE: "Mapping[str, Callable[[str, Request], list[Prepared]]]" = {
    "graph": _prepare_text,
    "runnable": _prepare_runnable,
    "model": _prepare_model,
    "exported": _prepare_exported,
}
