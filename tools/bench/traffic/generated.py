"""What the kernels of a module that Inductor generated read and write, from its text."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

#: Bytes of an element by the name that C++ or Triton has for its type.
_ITEM_BYTES = {
    **dict.fromkeys(("double", "int64_t", "fp64", "i64", "uint64_t", "u64"), 8),
    **dict.fromkeys(("float", "int32_t", "fp32", "i32", "uint32_t", "u32"), 4),
    **dict.fromkeys(("half", "at::Half", "bfloat16", "at::BFloat16", "fp16", "bf16", "int16_t", "i16"), 2),
    **dict.fromkeys(("bool", "i1", "int8_t", "uint8_t", "i8", "u8", "unsigned char"), 1),
}
_CPP_SIGNATURE = re.compile(r"void\s+kernel\(([^)]*)\)")
_TRITON_SIGNATURE = re.compile(r"'signature': \{([^}]*)\}")
_TRITON_ARGUMENT = re.compile(r"'(\w+)': '([^']*)'")


@dataclass(frozen=True)
class _Argument:
    """A kernel's argument: bytes of an element, 0 for a number; and whether the kernel reads and writes it."""

    item: int
    reads: bool
    writes: bool


def generated_traffic(source: str) -> tuple[int, int]:
    """Return bytes read and bytes written by one call of a module that Inductor generated for CPU or GPU.

    Its own kernels alone: what it calls through torch's dispatcher is for a dispatch mode to see. Raises ValueError for
    a kernel's argument whose size the text does not tell.
    """
    module = ast.parse(source)
    kernels = dict(_kernels(module))
    sizes = _sizes(module)
    read = written = 0
    for name, given in _launches(module, kernels):
        for argument, value in zip(kernels[name], given, strict=False):
            bytes_ = argument.item * _elements(value, sizes) if argument.item else 0
            read += bytes_ * argument.reads
            written += bytes_ * argument.writes
    return read, written


def _kernels(module: ast.Module) -> Iterator[tuple[str, list[_Argument]]]:
    """Every kernel's name and arguments; both kinds are made by assignments at the module's top."""
    for statement in module.body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        made = ast.unparse(statement.value.func)
        texts = [part.value for part in statement.value.args if isinstance(part, ast.Constant)]
        name = ast.unparse(statement.targets[0])
        if made == "async_compile.cpp_pybinding":
            yield name, _cpp_arguments(str(texts[-1]))
        elif made == "async_compile.triton":
            yield name, _triton_arguments(str(texts[-1]))


def _cpp_arguments(text: str) -> list[_Argument]:
    (signature,) = _CPP_SIGNATURE.findall(text)
    return [_cpp_argument(part.strip()) for part in signature.split(",")]


def _cpp_argument(text: str) -> _Argument:
    kind, _, name = text.removeprefix("const ").rpartition(" ")
    return _argument(name, kind.rstrip("*")) if "*" in kind else _Argument(0, False, False)


def _triton_arguments(text: str) -> list[_Argument]:
    (signature,) = _TRITON_SIGNATURE.findall(text)
    pairs = _TRITON_ARGUMENT.findall(signature)
    return [_argument(name, kind[1:]) if kind[0] == "*" else _Argument(0, False, False) for name, kind in pairs]


def _argument(name: str, kind: str) -> _Argument:
    """Inductor's names say which way the data goes: ``in_ptr0``, ``out_ptr0``, ``in_out_ptr0``."""
    if kind not in _ITEM_BYTES:
        raise ValueError(f"argument {name} of a generated kernel is of the unknown type {kind!r}")
    return _Argument(_ITEM_BYTES[kind], name.startswith("in_"), "out_ptr" in name)


def _launches(module: ast.Module, kernels: dict[str, list[_Argument]]) -> Iterator[tuple[str, Sequence[ast.expr]]]:
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).removesuffix(".run")
        if called in kernels:
            yield called, node.args


def _sizes(module: ast.Module) -> dict[str, int]:
    """Elements of every buffer that the text gives the shape of; a view's come after those that it looks at."""
    sizes: dict[str, int] = {}
    for node in ast.walk(module):
        for name, shape in _asserted(node):
            sizes[ast.unparse(name)] = _product(shape)
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            count = _size(node.value, sizes)
            if count is not None:
                sizes[node.targets[0].id] = count
    return sizes


def _asserted(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Inputs and their shapes as the module's first lines check them: one by one, or from torch 2.15 on in groups."""
    if not isinstance(node, ast.Call):
        return
    checked = ast.unparse(node.func)
    if checked == "assert_size_stride":
        yield node.args[0], node.args[1]
    elif checked == "assert_size_stride_grouped":
        names, shapes = node.args[:2]
        assert isinstance(names, ast.Tuple) and isinstance(shapes, ast.Tuple)
        yield from zip(names.elts, shapes.elts, strict=True)


def _size(value: ast.expr, sizes: dict[str, int]) -> int | None:
    if isinstance(value, ast.Name):
        return sizes.get(value.id)
    if not isinstance(value, ast.Call):
        return None
    made = ast.unparse(value.func)
    if made.startswith("empty_strided"):
        return _product(value.args[0])
    return _product(value.args[1]) if made == "reinterpret_tensor" else None


def _elements(value: ast.expr, sizes: dict[str, int]) -> int:
    """Elements of a kernel's argument; one element counts as none."""
    count = _size(value, sizes)
    if count is None:
        raise ValueError(f"the generated text does not tell the size of {ast.unparse(value)}")
    return count if count > 1 else 0


def _product(shape: ast.expr) -> int:
    try:
        return int(prod(ast.literal_eval(shape)))
    except ValueError as error:
        raise ValueError(f"{ast.unparse(shape)} is not a shape of fixed sizes") from error
