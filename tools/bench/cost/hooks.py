"""CUDA hooks and a device guard for a GPU that is absent, loaded before torch is."""

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

_SOURCE = Path(__file__).with_name("hooks.cpp")
_COMPILERS = ("g++", "clang++", "c++")


def prepare_torch() -> None:
    """Let torch take FakeTensors on "cuda", and import it. An existing GPU is hidden, so that all machines count alike.

    Call it before anything imports torch: torch creates its CUDA hooks once, at the first use. Raises OptionError if
    this torch does not allow it, or if there is no C++ compiler.
    """
    home = torch_home()
    build = runpy.run_path(str(home / "version.py"))
    for name, other in {"hip": "ROCm", "xpu": "XPU"}.items():
        if build.get(name):
            raise OptionError(
                f"counting needs a torch for NVIDIA GPUs, and torch {build['__version__']} is for {other}; accepted: "
                "builds for CUDA, and CPU builds (pip install torch --index-url https://download.pytorch.org/whl/cpu)"
            )
    assert "torch" not in sys.modules, "torch has already created its CUDA hooks"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    library = compiled_hooks(home, build["__version__"])
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(home / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    hooks = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    import torch  # noqa: F401

    hooks.fxamp_set_device_guard()


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
    cxx = compiler()
    text = _SOURCE.read_text()
    key = hashlib.sha256(f"{text} {home} {version} {cxx}".encode()).hexdigest()[:16]
    library = _cache_folder() / f"absent_gpu_{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{home}/include", f"-L{home}/lib", "-lc10", "-ltorch_cpu"]
        done = subprocess.run(
            [cxx, str(_SOURCE), *flags, "-o", str(fresh)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise OptionError(f"torch {version} cannot be made to compile for an absent GPU: {errors[0].strip()}")
        fresh.replace(library)
    return library


def _cache_folder() -> Path:
    """Return the folder of fxamp's own caches: in Inductor's if that has a place of its own, else in the user's."""
    caches = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(caches) / "fxamp"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compiler() -> str:
    """The path of a C++ compiler: the one that CXX names, else the first that exists.

    Raises OptionError, which names the package to install.
    """
    named = os.environ.get("CXX")
    for name in (named,) if named else _COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    tried = f"CXX is {named!r}, which does not exist" if named else f"none of {', '.join(_COMPILERS)} exists"
    raise OptionError(
        f"counting for an absent GPU needs a C++ compiler, and {tried}; install the package g++ (apt install g++, "
        "dnf install gcc-c++), or set CXX to a compiler"
    )
