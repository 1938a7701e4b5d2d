"""fxamp-bench kernels: all generated kernels, compiled for GPUs that need not be here, and their machine code counted.

``fxamp-bench check`` times them on a GPU that is here.
"""

import argparse
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from fxamp.errors import OptionError, nearest
from fxamp.tools.bench.report import Report, add_styles
from fxamp.tools.common.command_line import Parser
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.progress import bar


def parser(prog: str) -> Parser:
    """The options of this command."""
    result = Parser(prog, "Count the machine code of all generated kernels. fxamp-bench check times them on a GPU.")
    result.add_argument("--arch", action="append", default=[], metavar="A", help="count for this one only; repeatable")
    add_styles(result)
    return result


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Count all generated kernels for the devices of some architectures, or for all devices.

    Raises:
        OptionError: an architecture is unknown, or Triton or its disassembler is not installed.
    """
    try:
        import triton  # noqa: F401
    except ImportError as why:
        raise OptionError("it needs Triton, whose compiler makes the machine code: pip install triton") from why
    from fxamp.tools.bench.cost.kernels.devices import DEVICES
    from fxamp.tools.bench.cost.kernels.rows import rows, table
    from fxamp.tools.bench.cost.kernels.subjects import subjects

    known = list(dict.fromkeys(device.arch for device in DEVICES))
    for arch in options.arch:
        if arch not in known:
            raise OptionError(f"--arch {arch}: unknown{nearest(arch, known)}; accepted: {', '.join(known)}")
    devices = [device for device in DEVICES if not options.arch or device.arch in options.arch]
    documents: list[dict[str, Any]] = []
    every = subjects()
    with bar("counted", len(every) * len(devices), "kernel") as shown, so_far(lambda: table(documents, False)):
        for subject in every:
            say(f"{subject.name}, {'aligned' if subject.aligned else 'not aligned'} ...")
            for row in rows(subject, devices):
                documents.append(row.document())
                shown.update()
    document = {"version": 1, "versions": versions(), "rows": documents}
    return Report(document, table(documents, False), table(documents, True))


def versions() -> dict[str, str]:
    """What the machine code depends on besides fxamp."""
    return {name: version(name).partition("+")[0] for name in ("torch", "triton")}
