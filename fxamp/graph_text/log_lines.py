"""Turn a log or a file into plain lines, without colours and log prefixes, and split it into the graphs' classes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LOG_PREFIX = re.compile(
    r"(?:\[rank\d+\]:)?[VDIWEC]\d{4} \d\d:\d\d:\d\d(?:\.\d+)? \S+ [^\]\s]+:\d+\](?: \[[^\]]*\])* ?"
)
# TORCH_LOGS prints the file of the graph's code before the class.
_CLASS = re.compile(r"(\s*)(?:(?:<[^>#]*>\S*|[^#\"']*\.py) )?class\s+(\S+?)\s*\((?:torch\.)?(?:nn\.)?Module\)\s*:")
_FORWARD = re.compile(r"(\s*)def\s+forward\s*\(")
_TITLE = re.compile(r"(?i)\b(captured|forward|backward|joint|inference)\b.*graph|graph.*\b(forward|backward|joint)\b")


@dataclass(frozen=True)
class Block:
    """The text of one graph's class, unindented; ``line`` is the number of its first line in the file (from 1).

    ``name`` is the class's name as printed, ``head`` the comments directly above it, ``title`` the last line before
    those.
    """

    name: str
    text: str
    line: int
    head: tuple[str, ...]
    title: str


def plain_lines(text: str) -> list[str]:
    """Return the lines of ``text`` without terminal colours and the prefixes of torch's log."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")  # count lines as Python does
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    return [_LOG_PREFIX.sub("", line, count=1) if line[:1] in "VDIWEC[" else line for line in text.split("\n")]


def blocks(lines: list[str]) -> Iterator[Block]:
    """Yield the outermost classes of ``lines``, in order; a bare ``def forward`` counts as one."""
    at = 0
    while at < len(lines):
        match = _CLASS.match(lines[at]) or _FORWARD.match(lines[at])
        if match is None:
            at += 1
            continue
        indent = len(match[1])
        end = _end(lines, at, indent)
        body = [line[indent:] for line in lines[at:end]]
        named = match.re is _CLASS
        # Class names such as "<lambda>" are not valid Python.
        body = ["class GraphModule:", *body[1:]] if named else ["class GraphModule:", *(f" {line}" for line in body)]
        head, title = _above(lines, at)
        yield Block(match[2] if named else "GraphModule", "\n".join(body), at + 1 if named else at, head, title)
        at = end


def stage_of(title: str, file: str) -> str:
    """Return the AOTAutograd stage of a graph, from the line above it or its file's name; ``""`` if unknown."""
    name = file.replace("\\", "/").rpartition("/")[2].replace("_", " ").replace(".", " ")
    for text in (title, name):
        match = _TITLE.search(text)
        if match:
            stage = (match[1] or match[2]).lower()
            return "forward" if stage == "inference" else stage
    return ""


def _end(lines: list[str], start: int, indent: int) -> int:
    for at in range(start + 1, len(lines)):
        text = lines[at].lstrip()
        # The closing parenthesis of a long "def forward(" is on its own line.
        if text and not text.startswith(")") and len(lines[at]) - len(text) <= indent:
            return at
    return len(lines)


def _above(lines: list[str], at: int) -> tuple[tuple[str, ...], str]:
    start = at
    while start > 0 and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    title = next((lines[above] for above in range(start - 1, max(-1, start - 4), -1) if lines[above].strip()), "")
    return tuple(line.strip() for line in lines[start:at]), title
