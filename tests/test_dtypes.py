"""A device or a dtype is defined in one place, and everything else follows it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from fxamp import dtypes
from fxamp.devices import DEVICES
from fxamp.dtypes import DTYPES
from fxamp.graph import dtype_name
from fxamp.graph_text.model import FLOATS, ITEM_BYTES
from fxamp.policy import built_in_names
from fxamp.torch_dtypes import HALVES, NARROW

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("fxamp", "passes", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_there_is_a_built_in_policy_for_every_device_and_dtype() -> None:
    assert set(built_in_names()) == {f"{device}-{dtype}" for device in DEVICES for dtype in DTYPES}


def test_torch_has_every_dtype() -> None:
    assert list(NARROW.values()) == list(DTYPES)
    assert all(dtype.itemsize == 2 and dtype.is_floating_point for dtype in NARROW)
    assert {torch.float16, torch.complex32} == HALVES


def test_the_files_that_a_new_dtype_needs_exist() -> None:
    named = re.findall(r"\b(?:fxamp|passes)/[\w/]+\.py", str(dtypes.__doc__))
    assert len(named) > 8 and all((ROOT / name).is_file() for name in named)


def test_no_other_file_lists_devices_or_dtypes() -> None:
    """A display of two names or more is a second definition; one that maps names to something else is a table."""
    places = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in _second_definitions(path)]
    assert places == []


def _second_definitions(path: Path) -> Iterator[int]:
    if path in (ROOT / "fxamp/devices.py", ROOT / "fxamp/dtypes.py"):
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            continue
        words = {_word(item) for item in node.elts}
        if words == set(DTYPES) or words & {"xpu", "mps", "mtia"}:
            yield node.lineno


def _word(item: ast.expr) -> object:
    if isinstance(item, ast.Constant):
        return item.value
    is_torch = isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "torch"
    return item.attr if is_torch else None


def test_listings_know_the_bytes_of_every_dtype() -> None:
    """By the names that graphs print; torch prints none for quantized dtypes and for those of fewer than 8 bits."""
    dtypes = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "bits" not in str(dtype)]
    names = {dtype_name(dtype): dtype for dtype in dtypes if dtype_name(dtype) != str(dtype).removeprefix("torch.")}
    assert {"f8e5m2", "u16", "c32"} < set(names)
    assert {name: ITEM_BYTES.get(name) for name in names} == {name: dtype.itemsize for name, dtype in names.items()}
    assert {name for name, dtype in names.items() if dtype.is_floating_point} == FLOATS
