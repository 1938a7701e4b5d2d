"""Which private names of torch fxamp reads, where, and that the installed torch has them."""

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxamp.policy.model.comparisons import holds
from fxamp.torch_private.versions import EVERYWHERE, HERE

ROOT = Path(__file__).parents[2]
PRIVATE = ROOT / "fxamp/torch_private"
INTERNAL = ("torch.fx.experimental.", "torch.testing._internal.")


@pytest.mark.parametrize("name", [*EVERYWHERE, *HERE])
def test_a_torch_has_the_names_that_the_table_says(name: str) -> None:
    def found() -> bool:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            return False
        return True

    assert found() == holds((EVERYWHERE | HERE)[name], torch.__version__)


def test_private_names_are_read_in_one_place_and_are_in_the_table() -> None:
    files = [path for folder in ("fxamp", "passes", "tools") for path in (ROOT / folder).rglob("*.py")]
    here = [path for path in files if path.is_relative_to(PRIVATE)]
    outside = {name for path in files if path not in here for name in _read(path.read_text(encoding="utf-8"))}
    inside = {name for path in here for name in _read(path.read_text(encoding="utf-8"))}
    assert outside == EVERYWHERE.keys(), "import what torch may move in fxamp/torch_private, or list it"
    assert inside - EVERYWHERE.keys() == HERE.keys()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "from torch._dynamo.utils import counters, same",
            {"torch._dynamo.utils.counters", "torch._dynamo.utils.same"},
        ),
        ("import torch._inductor.compile_fx as inner", {"torch._inductor.compile_fx"}),
        ("from torch.fx.node import Node, _get_qualified_name", {"torch.fx.node._get_qualified_name"}),
        ("from torch.fx.experimental import proxy_tensor", {"torch.fx.experimental.proxy_tensor"}),
        ("torch._dynamo.config.patch(suppress_errors=True)", {"torch._dynamo.config"}),
        ("torch._C._functorch.get_unwrapped(x)", {"torch._C._functorch.get_unwrapped"}),
        ("torch._ops.OpOverload.name", {"torch._ops.OpOverload"}),
        ("torch.optim._functional.adam", {"torch.optim._functional.adam"}),
        ("from torch import nn; torch.ops.aten._to_copy; torch.__version__", set()),
    ],
)
def test_what_is_read_is_found(text: str, names: set[str]) -> None:
    assert set(_read(text)) == names


def _read(text: str) -> Iterator[str]:
    """The private names of torch that a module's text imports, or reads as attributes of ``torch``."""
    tree = ast.parse(text)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from filter(_is_private, (f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from filter(_is_private, (alias.name for alias in node.names))
        elif isinstance(node, ast.Attribute) and id(node) not in inner and _is_private(name := ast.unparse(node)):
            yield _without_members(name)


def _is_private(name: str) -> bool:
    root, *parts = name.split(".")
    hidden = any(part.startswith("_") and not part.endswith("__") for part in parts)
    return root == "torch" and parts[:1] != ["ops"] and (hidden or name.startswith(INTERNAL))


def _without_members(name: str) -> str:
    """``name`` up to what is private in it; of a private module, up to what is read of it."""
    parts = name.split(".")
    end = max(at for at, part in enumerate(parts) if part.startswith("_")) + 1
    return ".".join(parts[: end + inspect.ismodule(pkgutil.resolve_name(".".join(parts[:end])))])
