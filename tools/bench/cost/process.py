"""Counts in a process of its own: torch is prepared there before anything imports it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from fxamp.errors import OptionError
from fxamp.tools.bench.cost.count import Count
from fxamp.tools.bench.cost.workload import Way, Workload


def counts(requests: Iterable[tuple[Workload, Way]]) -> Iterator[Count]:
    """Count one request after another. Raises OptionError, in one line, where that cannot be done here."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "fxamp.tools.bench.cost.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environment(),
        ) as worker,
    ):
        assert worker.stdin is not None and worker.stdout is not None
        try:
            for workload, way in requests:
                worker.stdin.write(json.dumps({"workload": workload.as_dict(), "policy": way.policy}) + "\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
                if not line:
                    errors.seek(0)
                    said = [text.strip() for text in errors if text.strip()] or ["it said nothing"]
                    raise OptionError(f"{way.label}: its process ended with status {worker.wait()}: {said[-1]}")
                answer = json.loads(line)
                if "error" in answer:
                    raise OptionError(f"{way.label}: {answer['error']}")
                yield Count.from_dict(answer)
        finally:
            worker.kill()


def _environment() -> dict[str, str]:
    """This process's environment, with a path to this copy of fxamp, and without settings that choose a policy."""
    import fxamp

    home = str(Path(fxamp.__file__).parent.parent)
    paths = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {name: value for name, value in os.environ.items() if name not in ("FXAMP_POLICY", "FXAMP_DUMP")}
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
