"""A CPU with or without bfloat16 arithmetic, whatever this machine has: what torch reports of it is replaced.

The environment variable :data:`VARIABLE` names the CPU, so that the processes which tests start simulate the same:
this folder's ``sitecustomize`` calls :func:`simulate` in each.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "FXAMP_TEST_CPU"

#: The CPUs that can be simulated, each with the units by which fxamp tells whether it computes in bfloat16.
CPUS: Mapping[str, Mapping[str, bool]] = {
    "bfloat16": {"avx512_bf16": True, "amx_bf16": False, "bf16": False},
    "plain": {"avx512_bf16": False, "amx_bf16": False, "bf16": False},
}

_MODULE = "torch.cpu"


def simulate() -> None:
    """Replace what ``torch.cpu.get_capabilities`` returns, now or when torch is imported, if the variable is set."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    if _MODULE in sys.modules:
        _replace(sys.modules[_MODULE], CPUS[name])
    else:
        sys.meta_path.insert(0, _Finder(CPUS[name]))


def _replace(module: ModuleType, units: Mapping[str, bool]) -> None:
    real = module.get_capabilities

    def get_capabilities() -> Mapping[str, Any]:
        return {**real(), **units}

    get_capabilities.__doc__ = real.__doc__
    module.get_capabilities = get_capabilities  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    """Finds ``torch.cpu`` once, where it is, with a loader that replaces the function."""

    def __init__(self, units: Mapping[str, bool]) -> None:
        self._units = units

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        spec.loader = _Loader(spec.loader, self._units)
        return spec


class _Loader(Loader):
    def __init__(self, real: Loader, units: Mapping[str, bool]) -> None:
        self._real = real
        self._units = units

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        _replace(module, self._units)
