"""The location of a node in the user's program: file, line, expression, and module path."""

import linecache
from dataclasses import dataclass, replace
from functools import lru_cache

from torch.fx import Node


@dataclass(frozen=True)
class SourceFrame:
    """One frame of a node's stack: the file, its line, the function, the marked part of the line, the whole line."""

    file: str
    line: int
    function: str
    expression: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.expression}"


@lru_cache(maxsize=4096)
def _parse(stack_trace: str) -> tuple[SourceFrame, ...]:
    frames: list[SourceFrame] = []
    lines = stack_trace.splitlines()
    for index, text in enumerate(lines):
        head = text.strip()
        if not head.startswith('File "'):
            continue
        file, _, rest = head[len('File "') :].partition('", line ')
        number, _, function = rest.partition(", in ")
        if not number.isdigit():
            continue
        code = lines[index + 1] if index + 1 < len(lines) else ""
        marks = lines[index + 2] if index + 2 < len(lines) else ""
        whole = "" if code.lstrip().startswith('File "') else code.strip()
        frames.append(SourceFrame(file, int(number), function, _marked(code, marks) or whole, whole))
    return tuple(frames)


def _marked(code: str, marks: str) -> str:
    """Return the part of a traceback's source line that the ``^^^^`` line below it marks; ``""`` without marks."""
    if set(marks.strip()) - {"^", "~"} or not marks.strip():
        return ""
    start = len(marks) - len(marks.lstrip())
    return code[start : len(marks)].strip()


def source_frames(node: Node) -> tuple[SourceFrame, ...]:
    """Return the frames of the Python stack that created the node, outermost first; empty if unknown."""
    trace = node.meta.get("stack_trace")
    return _parse(trace) if trace else ()


def source_line(node: Node) -> SourceFrame | None:
    """Return the innermost frame; the line's text is read from its file if the stack lacks it. None if unknown."""
    frames = source_frames(node)
    if not frames or frames[-1].text:
        return frames[-1] if frames else None
    text = linecache.getline(frames[-1].file, frames[-1].line).strip()
    return replace(frames[-1], expression=text, text=text)


def describe_source(node: Node) -> str:
    """Return ``file:line: code`` of the innermost frame, or ``"unknown source"``."""
    return str(source_line(node) or "unknown source")


def _module_stack(node: Node) -> list[tuple[str, type | str]]:
    """Return paths and classes of the modules around the node, outermost first; a backward node has its forward's."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return list(stack.values()) if stack else []


def module_path(node: Node) -> str:
    """Return the dotted path of the module whose ``forward`` made the node, below the compiled root; ``""`` if none."""
    stack = _module_stack(node)
    return _clean(stack[-1][0]) if stack else ""


def module_class(node: Node) -> str:
    """Return the class of that module, without its package: ``"Linear"``; ``""`` if there is none."""
    stack = _module_stack(node)
    if not stack:
        return ""
    kind = stack[-1][1]
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]


def module_classes(node: Node) -> tuple[str, ...]:
    """Return the classes of all modules around the node, outermost first, with their packages."""
    kinds = [kind for _, kind in _module_stack(node)]
    return tuple(f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind for kind in kinds)


_ROOTS = ("self", "module", "mod", "fn")
"""The names by which Dynamo knows the compiled root; they are not part of a path."""


@lru_cache(maxsize=4096)
def _clean(path: str) -> str:
    """Return ``"L['self'].layers.0.mlp"`` (or with ``_modules['mlp']`` parts) as ``"layers.0.mlp"``.

    Dynamo begins paths with the scope of the root's name, local (``L``) or global (``G``); export does not.
    """
    scoped = path.startswith(("L[", "G["))
    for quote in ("'", '"'):
        path = path.replace(f"._modules[{quote}", ".").replace(f"[{quote}", ".").replace(f"{quote}]", "")
    parts = [part.strip("[]()'\"") for part in path.replace("[", ".").replace("]", "").split(".")]
    parts = [part for part in parts if part and part != "_modules"]
    if scoped:
        parts = parts[2 if parts[1] in _ROOTS else 1 :]
    return ".".join(parts)
