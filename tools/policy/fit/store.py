"""Measurements that outlive the process: JSON by the content that they depend on."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

import fxamp.tools
from fxamp.pipeline.cache_key import source_digest
from fxamp.tools.common.caches import cache_folder
from fxamp.tools.inputs.kinds import imported_names, program_syntax


@dataclass(frozen=True)
class Store:
    """Values in ``folder``; ``content`` is what all of them depend on."""

    folder: Path
    content: str

    @staticmethod
    def of(file: str) -> "Store":
        """Return the store for the model of ``file``: for its text, files beside it, versions, fxamp's code."""
        tools = [path.read_text(encoding="utf-8") for path in sorted(Path(fxamp.tools.__file__).parent.rglob("*.py"))]
        facts = [source_digest(), *tools, torch.__version__, *_texts(Path(file))]
        return Store(cache_folder() / "fit", hashlib.sha256("\0".join(facts).encode()).hexdigest())

    def get(self, *key: object) -> Any:
        """Return the value for ``key``, None if there is none."""
        try:
            return json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def put(self, value: Any, *key: object) -> None:
        """Write the value for ``key``; a reader sees all of it or nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(value, stream)
        Path(name).replace(self._path(key))

    def _path(self, key: tuple[object, ...]) -> Path:
        return self.folder / f"{hashlib.sha256(repr((self.content, key)).encode()).hexdigest()[:32]}.json"


def _texts(file: Path) -> Iterator[str]:
    """Yield the texts of ``file`` and of the files beside it that these import, and the versions of packages."""
    names: set[str] = set()
    known, new = set[Path](), {file}
    while new:
        for path in sorted(new):
            yield path.read_text(encoding="utf-8")
            names |= imported_names(program_syntax(str(path), "a Python file"))
        known |= new
        folder = file.parent
        beside = {folder / f"{name}.py" for name in names}.union(
            *((folder / name).rglob("*.py") for name in names if name)
        )
        new = {path for path in beside if path.is_file()} - known
    distributions = packages_distributions()
    packages = {package for name in names for package in distributions.get(name, ())}
    yield from (f"{package} {version(package)}" for package in sorted(packages))
