"""The page fxamp/README.md lists every piece of state that a module keeps, and nothing else."""

import ast
import re
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxamp.optim.tracing import stand_ins

ROOT = Path(__file__).parents[2]

#: Values that are made to change, when called at module level.
_CHANGING = frozenset(
    [
        "Counter",
        "Lock",
        "OrderedDict",
        "RLock",
        "WeakKeyDictionary",
        "WeakSet",
        "WeakValueDictionary",
        "count",
        "defaultdict",
        "deque",
        "dict",
        "list",
        "local",
        "set",
    ]
)
_LOCKS = frozenset({"Lock", "RLock"})


def state_of(text: str) -> set[str]:
    """The names at module level of what changes: empty containers, collections, caches, what ``global`` rebinds.

    A container with entries counts if a function of the module writes to it. Locks that guard another name do not.
    """
    tree = ast.parse(text)
    written = set(_written(tree))
    names = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    locks: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(part) for part in node.decorator_list):
            names.add(node.name)
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        (name,) = [ast.unparse(part) for part in (node.targets if isinstance(node, ast.Assign) else [node.target])]
        call = _called(node.value)
        if call in _LOCKS:
            locks.add(name)
        elif call in _CHANGING or call == "cache" or _empty(node.value) or name in written:
            names.add(name)
    return names or locks


def _called(value: ast.expr) -> str:
    return ast.unparse(value.func).rpartition(".")[2].partition("[")[0] if isinstance(value, ast.Call) else ""


def _empty(value: ast.expr) -> bool:
    return (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)


def _written(tree: ast.Module) -> Iterator[str]:
    """Names whose entries a function sets or deletes, or that it tells to change."""
    for function in (node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))):
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                yield ast.unparse(node.value)


PAGE = (ROOT / "fxamp/README.md").read_text(encoding="utf-8")
TABLE, CACHES = PAGE.split("## State of the process")[1].split("\n## ")[0].split("These are caches of pure functions")


def named(text: str) -> set[str]:
    """Each state that ``text`` names: a file, and then names in it."""
    files = re.findall(r"`([\w/]+\.py)`((?:,?\s`\w+`)+)", text)
    return {f"{file} {name}" for file, names in files for name in re.findall(r"\w+", names)}


def code() -> dict[str, str]:
    """The text of each module of fxamp and its passes, by the path that the page has for it."""
    files = {f"{path.relative_to(ROOT / 'fxamp')}": path for path in (ROOT / "fxamp").rglob("*.py")}
    files |= {f"{path.relative_to(ROOT)}": path for path in (ROOT / "passes").rglob("*.py")}
    return {file: path.read_text(encoding="utf-8") for file, path in files.items()}


def test_the_page_lists_what_the_code_keeps() -> None:
    assert {f"{file} {name}" for file, text in code().items() for name in state_of(text)} == named(TABLE + CACHES)


def test_what_the_page_calls_a_cache_is_one() -> None:
    modules = code()
    for file, name in map(str.split, named(CACHES)):
        assert re.search(rf"^@.*cache.*\ndef {name}\(", modules[file], re.MULTILINE), f"{file} {name}"


def test_the_page_draws_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = [sorted(layer.replace("fxamp.", "").split(" | ")) for layer in contracts[0]["layers"]]
    drawn = re.findall(r'^ +(\w+)\["([\w, ]+):', PAGE, re.MULTILINE)
    assert [sorted(names.split(", ")) for _, names in drawn] == layers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: dict[int, int] = {}", {"a"}),
        ("a = []", {"a"}),
        ("a = weakref.WeakKeyDictionary()", {"a"}),
        ("@functools.lru_cache(maxsize=3)\ndef a(): ...", {"a"}),
        ("a = 1\ndef f():\n    global a\n    a = 2", {"a"}),
        ("a = {1: 2}\ndef f():\n    a[3] = 4", {"a"}),
        ("a = {1: 2}\nb = (1,)\ndef f():\n    return a[1]", set()),
        ("a = []\nb = Lock()", {"a"}),
        ("b = Lock()", {"b"}),
    ],
)
def test_state_is_found(text: str, expected: set[str]) -> None:
    assert state_of(text) == expected


def test_an_optimizer_is_borrowed_by_one_thread_at_a_time() -> None:
    inside, leave, flags = threading.Event(), threading.Event(), []

    class Slow(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def, override]
            flags.append(len(self.param_groups[0]["params"]))
            inside.set()
            leave.wait(timeout=60)

    real = torch.nn.Parameter(torch.ones(2))
    optimizer = Slow([real], lr=0.1)

    def run() -> None:
        stand_in = torch.zeros(2)
        stand_ins.run_on_stand_ins(optimizer, [stand_in], [{"lr": 0.1}], [1], {}, {})

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(timeout=60)
    threads[1].join(timeout=0.2)
    waiting = len(flags) == 1
    leave.set()
    for thread in threads:
        thread.join(timeout=60)
    assert waiting and flags == [1, 1]
    assert optimizer.param_groups[0]["params"][0] is real
