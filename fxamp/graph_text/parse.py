"""Read graphs that were dumped as text: torch's, in any of their wrappings, and fxamp's own.

    GraphModule.print_readable, TORCH_COMPILE_DEBUG's fx_graph_readable.py and fx_graph_transformed.py, tlparse's
    *_graph_*.txt, TORCH_LOGS=graph_code,aot_graphs (prefixes, titles and colours are read over), depyf's files,
    Inductor's fx_graph_runnable.py (see runnable), fxamp's dumps

The text is Python. It is only parsed, never executed, imported or evaluated.
"""

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxamp.errors import ListingError, nearest
from fxamp.graph_text.body import read_class
from fxamp.graph_text.comments import PREFIX, read_comment
from fxamp.graph_text.fields import Fields, graph_fields
from fxamp.graph_text.log_lines import Block, blocks, plain_lines, stage_of
from fxamp.graph_text.model import Document, Listing
from fxamp.graph_text.python import as_python, class_of
from fxamp.graph_text.runnable import input_types

_ACCEPTED = (
    "the text of GraphModule.print_readable(), fx_graph_readable.py or fx_graph_runnable.py of TORCH_COMPILE_DEBUG, "
    "a graph of tlparse or TORCH_LOGS, or a dump of fxamp"
)


def read_file(path: str) -> Document:
    """Read the graphs in the file at ``path``; raises ListingError with the file and, if known, the line."""
    file = Path(path)
    if file.is_dir():
        raise ListingError(f"{path} is a folder; accepted: one of its files, {_ACCEPTED}")
    if not file.is_file():
        there = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        raise ListingError(f"{path}: no such file{nearest(file.name, there)}")
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ListingError(f"{path} is not text (byte {error.start} is not UTF-8); accepted: {_ACCEPTED}") from error
    except OSError as error:
        raise ListingError(f"{path}: {error.strerror}") from error
    return parse_text(text, path)


def parse_text(text: str, file: str) -> Document:
    """Return the graphs in ``text``; ``file`` is its name, for messages. Raises ListingError as ``file:line: what``."""
    if not text.strip():
        raise ListingError(f"{file} is empty; accepted: {_ACCEPTED}")
    lines = plain_lines(text)
    notes: list[str] = []
    with _no_collection():
        graphs = [_graph(block, file, notes) for block in blocks(lines)]
    if not graphs:
        missing = f"no class of torch.nn.Module with a forward{_not_python(text)}"
        raise ListingError(f"{file} holds no graph: {missing}; accepted: {_ACCEPTED}")
    if "def load_args(" in text:
        graphs[0] = input_types(graphs[0], "\n".join(lines), file)
    return Document(tuple(graphs), tuple(notes))


def _not_python(text: str) -> str:
    """Return where ``text`` fails to be Python, for a file that was meant to define a model; ``""`` if it is Python."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        at = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        return f"; it is not Python either: {at}{getattr(error, 'msg', None) or error}"
    return ""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector: syntax trees have no cycles, and scanning millions of their nodes is slow."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _graph(block: Block, file: str, notes: list[str]) -> Listing:
    tree, block = _syntax(block, file)
    about, ours = _about(block, file, notes)
    try:
        listing = read_class(tree, block, ours, f"{file}:", notes)
    except RecursionError:
        raise ListingError(f"{file}:{block.line}: {block.name} is nested too deeply to be read") from None
    if not ours:
        about = {"stage": stage_of(block.title, file) or _stage_by_inputs(listing)}
    return Listing(block.name, listing.entries, listing.bodies, **about)


def _syntax(block: Block, file: str) -> tuple[ast.ClassDef, Block]:
    """Return the syntax tree of a graph's class, and its text: the block's, or the part of it that is valid Python."""
    try:
        return class_of(block.text), block
    except SyntaxError as error:
        mended = as_python(block.text)
        with suppress(SyntaxError, RecursionError, MemoryError, ValueError):
            return class_of(mended), replace(block, text=mended)
        line = block.line + (error.lineno or 1) - 1
        at_end = (error.lineno or 1) >= block.text.rstrip().count("\n") + 1
        hint = "; the file ends here: is it truncated?" if at_end else ""
        raise ListingError(f"{file}:{line}: not the text of a graph: {error.msg}{hint}") from error
    except (RecursionError, MemoryError, ValueError) as error:
        raise ListingError(
            f"{file}:{block.line}: {block.name} cannot be read: {error or 'too deeply nested'}"
        ) from None


def _about(block: Block, file: str, notes: list[str]) -> tuple[dict[str, Any], bool]:
    """Return the graph's fields in the comments above a class, and whether fxamp wrote them."""
    comments = [line for line in block.head if line.startswith(PREFIX)]
    fields: Fields = []
    try:
        for line in comments:
            fields += read_comment(line)
        about, unknown = graph_fields(fields)
    except ValueError as error:
        raise ListingError(f"{file}:{max(1, block.line - 1)}: {error}") from error
    notes += [f"{file}:{block.line}: unknown key {key!r} in fxamp's comment" for key in unknown]
    return (about, True) if comments else ({}, False)


def _stage_by_inputs(listing: Listing) -> str:
    """Recognise the stage by input names."""
    if not listing.has_tangents:
        return ""
    # Only a joint graph returns its results as nested structures.
    joint = any(e.kind == "output" and e.call.startswith("pytree.tree_unflatten(") for e in listing.entries)
    return "joint" if joint else "backward"
