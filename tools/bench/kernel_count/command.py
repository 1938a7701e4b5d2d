"""The report of ``fxamp-bench kernels --count``."""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from fxamp.errors import OptionError, nearest
from fxamp.tools.bench.report import Report
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.progress import bar


def counted(archs: Sequence[str], say: Callable[[str], None]) -> Report:
    """Count all generated kernels for the devices of these architectures; for all devices if there are none.

    Raises:
        OptionError: an architecture is unknown, or Triton or its disassembler is not installed.
    """
    try:
        import triton  # noqa: F401
    except ImportError as why:
        raise OptionError(
            "--count: it needs Triton, whose compiler makes the machine code: pip install triton"
        ) from why
    from fxamp.tools.bench.kernel_count.devices import DEVICES
    from fxamp.tools.bench.kernel_count.subjects import subjects
    from fxamp.tools.bench.kernel_count.table import drawn, rows

    known = list(dict.fromkeys(device.arch for device in DEVICES))
    for arch in archs:
        if arch not in known:
            raise OptionError(f"--arch {arch}: unknown{nearest(arch, known)}; accepted: {', '.join(known)}")
    devices = [device for device in DEVICES if not archs or device.arch in archs]
    documents: list[dict[str, Any]] = []
    every = subjects()
    with bar("counted", len(every) * len(devices), "kernel") as shown, so_far(lambda: drawn(documents, False)):
        for subject in every:
            say(f"{subject.name}, {'aligned' if subject.aligned else 'not aligned'} ...")
            for row in rows([subject], devices):
                documents.append(row.document())
                shown.update()
    document = {"version": 1, "versions": versions(), "rows": documents}
    return Report(document, drawn(documents, False), drawn(documents, True))


def versions() -> dict[str, str]:
    """What the machine code depends on besides fxamp."""
    return {name: version(name).partition("+")[0] for name in ("torch", "triton")}
