"""Generated kernels run from their text: neither a changed file nor a planted ``.pyc`` beside it is run."""

import importlib.util
import inspect
import linecache
import marshal
import os
import struct
from pathlib import Path

import pytest

from fxamp.kernels import store

TEXT = "def kernel():\n    return 'generated'\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    store.load_function.cache_clear()
    return tmp_path / "fxamp"


def test_a_planted_pyc_is_not_run() -> None:
    path = store.write_source("kernel", TEXT)
    status = path.stat()
    planted = Path(importlib.util.cache_from_source(str(path)))
    planted.parent.mkdir()
    code = marshal.dumps(compile(TEXT.replace("generated", "planted"), str(path), "exec"))
    head = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, int(status.st_mtime), status.st_size)
    planted.write_bytes(head + code)
    assert store.load_function("kernel", TEXT)() == "generated"


def test_a_file_that_changes_is_not_read_again() -> None:
    function = store.load_function("kernel", TEXT)
    path = Path(function.__code__.co_filename)
    assert path.read_text() == TEXT
    path.write_text(TEXT.replace("generated", "planted"))
    linecache.checkcache()
    assert inspect.getsource(function) == TEXT  # as Triton reads it
    store.load_function.cache_clear()
    assert store.load_function("kernel", TEXT)() == "generated" and path.read_text() == TEXT


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_others_may_not_write_to_the_folder(mode: int, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(mode)
    store.write_source("kernel", TEXT)
    assert folder.stat().st_mode & 0o022 == 0


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    user = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    if user == 0:
        os.chown(folder, 4242, -1)
    with pytest.raises(PermissionError, match=r"belongs to another user .* TRITON_CACHE_DIR"):
        store.write_source("kernel", TEXT)
