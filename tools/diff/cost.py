"""The cost of a training step on a GPU under two policies and with torch.compile, from ``fxamp-bench cost``."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxamp.errors import OptionError
from fxamp.tools.diff.sides import Side


@dataclass(frozen=True)
class Cost:
    """The counts for the model of one file; ``output`` is the command's output."""

    file: str
    output: str

    def content(self) -> dict[str, Any]:
        """Return the figures as JSON values; ``output`` must be JSON."""
        return {"file": self.file, **json.loads(self.output)}

    def lines(self) -> Iterator[str]:
        """Title, table and notes, in the requested style."""
        yield from self.output.rstrip("\n").split("\n")


def cost(file: str, old: Side, new: Side, style: str) -> Cost:
    """Count the model that ``file`` defines, in float16 or bfloat16 as the new policy says.

    ``style``: "text", "json" or "markdown". Raises OptionError for another file or device, and with what the command
    says if it cannot count.
    """
    if Path(file).suffix != ".py":
        raise OptionError(f"--cost counts models, and --graph {file} is not one; accepted: a MODEL.py")
    for side in (old, new):
        if side.policy.device != "cuda":
            raise OptionError(f"--cost counts for GPUs: {side.source} is for {side.policy.device}; accepted: cuda")
    arguments = [file, f"--dtype={new.policy.lower_precision_fp}", f"--policy={old.source}", f"--policy={new.source}"]
    return Cost(file, run_command([*arguments, *([f"--{style}"] if style in ("json", "markdown") else [])]))


def run_command(arguments: Sequence[str]) -> str:
    """Return the output of ``fxamp-bench cost``, run in a separate process."""
    command = [sys.executable, "-m", "fxamp.tools.bench.command", "cost", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        messages = [line for line in done.stderr.splitlines() if line.strip()] or ["it printed nothing"]
        raise OptionError(f"--cost: {messages[-1]}")
    return done.stdout
