"""Nothing outside fxamp/torch_private reaches for what it wraps; each of its functions has a test in this folder.

A failure in this folder on a new torch says which function there needs another way.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from fxamp import torch_private as private

ROOT = Path(__file__).parents[2]
PRIVATE = ROOT / "fxamp/torch_private"

#: Attributes of torch's objects that only torch_private may reach for; names of modules are in its versions.py.
SHARP = frozenset(
    {
        "_execution_engine",
        "_forward_cls",
        "_fwd_used_autocast",
        "_get_active_ddp_module",
        "_global_optimizer_post_hooks",
        "_global_optimizer_pre_hooks",
        "_input_metadata",
        "_opt_called",
        "_optimizer_step_post_hooks",
        "_optimizer_step_pre_hooks",
        "_param_name_to_source",
        "_torchdynamo_orig_backend",
        "_sequence_nr",
        "add_python_lambda_leaf_guard_to_root",
        "bw_donated_idxs",
        "cached_backends",
        "compiled_bw",
        "fw_metadata",
        "maybe_subclass_metadata",
    }
)


def test_no_other_file_reaches_for_what_is_private_here() -> None:
    uses = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("fxamp", "passes", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.parent != PRIVATE
        for name in _names(ast.parse(path.read_text(encoding="utf-8")))
        if name in SHARP
    ]
    assert uses == []


def test_every_function_has_a_test() -> None:
    functions = {node.name for tree in _trees(PRIVATE) for node in tree.body if isinstance(node, ast.FunctionDef)}
    public = {name for name in functions if not name.startswith("_")}
    used = {name for tree in _trees(Path(__file__).parent) for name in _names(tree)}
    assert public and public <= used and public <= set(vars(private))


def _trees(folder: Path) -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.py"))]


def _names(tree: ast.AST) -> Iterator[str]:
    """Every attribute and every name imported, and what ``getattr`` and its kin are given as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            yield from (part.value for part in node.args[1:2] if isinstance(part, ast.Constant))
