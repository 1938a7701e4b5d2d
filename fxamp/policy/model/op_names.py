"""Op names in policies: their canonical form, and the ops that a name covers."""

import re
from fnmatch import fnmatchcase

ACCEPTED = (
    "'mm' (aten), 'aten::mm', 'aten.mm', 'aten::sum.dim_IntList' (one overload), 'mylib::op', or a glob such as 'conv*'"
)

_NAME = re.compile(r"(?:[\w*?\[\]!-]+::)?[\w*?\[\]!-]+(?:\.[\w*?\[\]!-]+)?")
_PYTHON = re.compile(r"(?:torch\.ops\.(?P<any>\w+)|(?P<torchs>aten|prims|quantized))\.(?P<op>.+)")
_GLOB = re.compile(r"[*?\[]")


def canonical(name: str) -> str:
    """Return ``name`` with its namespace, by default aten: ``"aten::mm"`` for ``"mm"``.

    Python's spelling is accepted too: ``"aten.mm.default"`` and ``"torch.ops.mylib.op"``. Raises ValueError, which says
    what is accepted, if ``name`` is not the name of an op.
    """
    python = _PYTHON.fullmatch(name)
    spelled = f"{python['any'] or python['torchs']}::{python['op']}" if python else name
    if not _NAME.fullmatch(spelled):
        raise ValueError(f"{name!r} is not an op name; accepted: {ACCEPTED}")
    return spelled if "::" in spelled else f"aten::{spelled}"


def aten_ops(names: str) -> frozenset[str]:
    """Return the full names of ATen's ops ``names``, which spaces or lines separate."""
    return frozenset(f"aten::{name}" for name in names.split())


def is_glob(name: str) -> bool:
    """Return whether a canonical name has wildcards."""
    return _GLOB.search(name) is not None


def spellings(op: str) -> tuple[str, str]:
    """Return an op's full name and its packet's name: ``"aten::mm"`` gives ``("aten::mm.default", "aten::mm")``.

    A name without overload means the default overload, as in torch's ``OpOverload.name()``.
    """
    packet, _, overload = op.partition(".")
    return f"{packet}.{overload or 'default'}", packet


def glob_covers(pattern: str, op: str) -> bool:
    """Return whether a glob matches an op's full name, or its name without overload."""
    return any(fnmatchcase(name, pattern) for name in spellings(op))


def covers(name: str, op: str) -> bool:
    """Return whether a canonical name or glob covers an op."""
    return glob_covers(name, op) if is_glob(name) else name in spellings(op)
