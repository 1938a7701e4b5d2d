"""Which private names of torch fxamp reads, where, and that the installed torch has them."""

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRIVATE = ROOT / "fxamp/torch_private"
INTERNAL = ("torch.fx.experimental.", "torch.testing._internal.")


#: Names that any file may read: torch documents them, graphs call them, or libraries around torch rely on them.
EVERYWHERE = {
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C.DispatchKey",
    "torch._C._VariableFunctions",
    "torch._C._disabled_torch_function_impl",
    "torch._C._dispatch_has_kernel",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._fft",
    "torch._C._functorch",
    "torch._C._jit_get_schemas_for_operator",
    "torch._C._linalg",
    "torch._C._nn",
    "torch._C._set_grad_enabled",
    "torch._C._special",
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "torch._amp_update_scale_",
    "torch._dynamo.OptimizedModule",
    "torch._dynamo.config",
    "torch._dynamo.reset",
    "torch._foreach_copy_",
    "torch._foreach_div_",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._grouped_mm",
    "torch._inductor.config",
    "torch._inductor.list_mode_options",
    "torch._ops.HigherOrderOperator",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch._scaled_grouped_mm",
    "torch._scaled_mm",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.is_fake",
    "torch._sym_sqrt",
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    "torch.cuda._sleep",
    "torch.fx.experimental.symbolic_shapes.DimDynamic",
    "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree",
}


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


def names_in(*folders: Path) -> set[str]:
    """The private names of torch that the files of folders read, but for those of fxamp/torch_private inside them."""
    files = {path for folder in folders for path in folder.rglob("*.py")}
    if PRIVATE not in folders:
        files -= set(PRIVATE.rglob("*.py"))
    return {name for path in files for name in _read(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", sorted(EVERYWHERE | names_in(PRIVATE)))
def test_this_torch_has_every_private_name(name: str) -> None:
    pkgutil.resolve_name(name)


def test_private_names_are_read_in_one_place() -> None:
    outside = names_in(*(ROOT / folder for folder in ("fxamp", "passes", "tools")))
    assert outside == EVERYWHERE, "import what torch may move in fxamp/torch_private, or list it above"


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
