"""Facts about the machine that measured numbers depend on."""

import os
import platform
import re
from pathlib import Path


def machine(device: str, threads: int) -> dict[str, str]:
    """Return the facts to report with absolute numbers: ``device`` (the GPU's or CPU's name), torch, Python, Triton.

    ``device`` is ``"cpu"`` or ``"cuda"``; ``threads`` are the CPU threads that were used.
    """
    import torch

    cpu = f"{_model()}, {threads} thread{'s' if threads > 1 else ''}"
    facts = {"device": cpu, "torch": torch.__version__, "python": platform.python_version()}
    if device == "cuda":
        facts["device"] = torch.cuda.get_device_name()
    try:
        import triton
    except ImportError:
        return facts
    return facts | {"triton": triton.__version__}


#: A machine with a higher load than this before a measurement has other work, and its times say little.
QUIET = 0.7


def load() -> float:
    """Return how many processes wanted to run in the last minute on average; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _model() -> str:
    """Return the CPU's model from /proc/cpuinfo, if that exists."""
    source = Path("/proc/cpuinfo")
    text = source.read_text() if source.is_file() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return name.group(1).strip() if name else platform.processor() or platform.machine()
