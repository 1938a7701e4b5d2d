"""CUDA hooks and a device guard for a torch that was built without CUDA, loaded before torch is."""

import ctypes
import hashlib
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fxamp.errors import OptionError
from fxamp.tools.common.caches import cache_folder

_SOURCE = Path(__file__).with_name("hooks.cpp")
_COMPILERS = ("g++", "clang++", "c++")


def prepare_torch() -> bool:
    """Let torch take FakeTensors on "cuda", and import it; returns whether the GPU is pretended.

    Call it before anything imports torch: torch makes its CUDA hooks once, for the first who asks. With a GPU at hand
    there is nothing to do. Raises OptionError where this torch cannot be made to, or where there is no C++ compiler.
    """
    home = torch_home()
    build = runpy.run_path(str(home / "version.py"))
    kind = "cuda" if build.get("cuda") else "another GPU" if build.get("hip") or build.get("xpu") else "cpu"
    if kind == "cuda":
        import torch

        if torch.cuda.is_available():
            return False
    if kind != "cpu":
        raise OptionError(
            f"torch {build['__version__']} is built for {kind}, and there is no NVIDIA GPU that it can use; accepted: "
            "a CPU build of torch (pip install torch --index-url https://download.pytorch.org/whl/cpu), or a GPU"
        )
    assert "torch" not in sys.modules, "torch has made its CUDA hooks already"
    library = compiled_hooks(home, build["__version__"])
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(home / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    hooks = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    import torch

    hooks.fxamp_add_device_guard()
    return True


def torch_home() -> Path:
    """Where torch is installed."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    home = Path(spec.origin).parent
    if not (home / "lib" / "libtorch_cpu.so").exists():
        raise OptionError(
            f"counting for an absent GPU needs torch's libraries for Linux; there are none in {home / 'lib'}"
        )
    return home


def compiled_hooks(home: Path, version: str) -> Path:
    """The hooks' shared library for this torch, compiled on the first call; raises as :func:`prepare_torch`."""
    compiler = _compiler()
    text = _SOURCE.read_text()
    key = hashlib.sha256(f"{text} {home} {version} {compiler}".encode()).hexdigest()[:16]
    library = cache_folder() / f"absent_gpu_{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{home}/include", f"-L{home}/lib", "-lc10", "-ltorch_cpu"]
        done = subprocess.run(
            [compiler, str(_SOURCE), *flags, "-o", str(fresh)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise OptionError(f"torch {version} cannot be made to compile for an absent GPU: {errors[0].strip()}")
        fresh.replace(library)
    return library


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else _COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    tried = f"CXX is {named!r}, which is not there" if named else f"there is none of {', '.join(_COMPILERS)}"
    raise OptionError(f"counting for an absent GPU needs a C++ compiler, and {tried}")
