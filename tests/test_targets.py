"""A device, a dtype, a lowering is defined in one place, and everything else follows it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

from fxamp.backend.lowering import _LOWERINGS
from fxamp.dtypes import HALVES, NARROW, widest_float
from fxamp.lowerings import LOWERINGS, inductor_modes, mode_settings
from fxamp.policy import built_in_names
from fxamp.targets import DEVICES, DTYPES, NO_FLOAT64

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("fxamp", "passes", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_there_is_a_built_in_policy_for_every_device_and_dtype() -> None:
    assert set(built_in_names()) == {f"{device}-{dtype}" for device in DEVICES for dtype in DTYPES}


def test_torch_has_autocast_for_every_device() -> None:
    for device in DEVICES:
        assert torch.get_autocast_dtype(device).is_floating_point


def test_torch_has_every_dtype() -> None:
    assert list(NARROW.values()) == list(DTYPES)
    assert all(dtype.itemsize == 2 and dtype.is_floating_point for dtype in NARROW)
    assert {torch.float16, torch.complex32} == HALVES


def test_the_widest_float_is_float64_where_there_is_one() -> None:
    assert {device: widest_float(torch.device(device)) for device in DEVICES} == {
        device: torch.float32 if device in NO_FLOAT64 else torch.float64 for device in DEVICES
    }


def test_every_lowering_is_one_that_the_backend_has() -> None:
    assert tuple(_LOWERINGS) == LOWERINGS


def test_the_modes_are_inductors_own() -> None:
    from torch._inductor import config

    assert {"default", "max-autotune"} <= set(inductor_modes())
    for mode in inductor_modes():
        assert mode_settings(mode).keys() <= config.get_config_copy().keys()
    assert mode_settings(None) == {}


def test_no_other_file_lists_devices_or_dtypes() -> None:
    """A display of two names or more is a second definition; one that maps names to something else is a table."""
    found = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in _second_definitions(path)]
    assert found == []


def _second_definitions(path: Path) -> Iterator[int]:
    if path == ROOT / "fxamp/targets.py":
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
