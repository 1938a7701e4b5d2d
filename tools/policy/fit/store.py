"""Measurements that outlive the process: JSON by the content that they depend on."""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

from fxamp.backend.cache_key import source_digest
from fxamp.tools.common.caches import cache_folder
from fxamp.tools.inputs.kinds import imported_names, program_syntax


@dataclass(frozen=True)
class Store:
    """Values in ``folder``; ``content`` is what all of them depend on."""

    folder: Path
    content: str

    @staticmethod
    def of(file: str) -> "Store":
        """Return the store for the model of ``file``: for its text, that of files beside it, and versions."""
        facts = [source_digest(), torch.__version__, *_texts(Path(file), set())]
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


def _texts(file: Path, known: set[Path]) -> list[str]:
    """Return the text of ``file`` and of the files beside it that it imports, and versions of the packages."""
    known.add(file)
    facts = [file.read_text(encoding="utf-8")]
    for name in sorted(imported_names(program_syntax(str(file), "a Python file"))):
        beside = [file.parent / f"{name}.py", *sorted((file.parent / name).rglob("*.py"))]
        own = [path for path in beside if path.is_file() and path not in known]
        for path in own:
            facts += _texts(path, known)
        facts += [f"{one} {version(one)}" for one in sorted(set(packages_distributions().get(name, ())))]
    return facts
