"""The figures of one policy: what a step moves and keeps, by the count, and the error of its gradients, by a run."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from fxamp.errors import OptionError
from fxamp.policy import Policy
from fxamp.tools.bench.cost.process import counts
from fxamp.tools.bench.cost.row import Row, extrapolated, row
from fxamp.tools.bench.cost.workload import Way, Workload
from fxamp.tools.bench.train.models import MODELS

#: The counted model, in its full size, and the layers that are counted and extrapolated.
MODEL, LAYERS = "gpt2-124m", (2, 4)
_TINY = Path(__file__).with_name("tiny_gpt2.py")


@dataclass(frozen=True)
class Figures:
    """Ratios of one policy, None where there is none.

    ``bytes``: what a step moves; ``kept``: what the forward keeps for the backward; each over torch.compile +
    autocast's. ``error``: of the gradient against float64, over autocast's.
    """

    bytes: float | None = None
    kept: float | None = None
    error: float | None = None

    def content(self) -> dict[str, float]:
        """Return the ratios that there are, to three digits after the point."""
        return {name: round(ratio, 3) for name, ratio in asdict(self).items() if ratio is not None}


def figures(policies: Sequence[str]) -> Iterator[tuple[str, Figures]]:
    """Yield the figures of one policy after another: those for CUDA are counted, those for CPUs are run."""
    loaded = [(name, Policy.load(name)) for name in policies]
    counted = _counted([(name, policy.lower_precision_fp) for name, policy in loaded if policy.device == "cuda"])
    for name, policy in loaded:
        if policy.device == "cuda":
            yield name, next(counted)
        elif policy.device == "cpu":
            yield name, Figures(error=_error(name, f"cpu-{policy.lower_precision_fp}"))
        else:
            yield name, Figures()


def _counted(policies: Sequence[tuple[str, str]]) -> Iterator[Figures]:
    """Yield the figures of each policy and dtype, counted in one process; torch is counted once for each dtype."""
    full = MODELS[MODEL].sizes["full"]
    before = dict.fromkeys(("", dtype) for _, dtype in policies)
    ways = [*before, *policies]
    found = counts(
        (Workload(MODEL, dtype=dtype, sizes={**full, "layers": layers}), Way(policy))
        for policy, dtype in ways
        for layers in LAYERS
    )
    torch: dict[str, Row] = {}
    for policy, dtype in ways:
        label = Way(policy).label
        ours = extrapolated(LAYERS, [row(label, policy, count) for count in islice(found, len(LAYERS))], full["layers"])
        if policy:
            yield Figures(bytes=ours.bytes / torch[dtype].bytes, kept=ours.kept / torch[dtype].kept)
        else:
            torch[dtype] = ours


def _error(policy: str, autocast: str) -> float:
    """Return the gradient error of ``policy`` over that of the policy that equals autocast, by ``fxamp-diff --run``."""
    command = [sys.executable, "-m", "fxamp.tools.diff.command", autocast, policy]
    done = subprocess.run(
        [*command, "--run", str(_TINY), "--format", "json"], capture_output=True, text=True, check=False
    )
    if not done.stdout:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise OptionError(f"fxamp-diff {autocast} {policy}: {said[-1]}")
    (run,) = json.loads(done.stdout)["runs"]
    return float(run["new"]["gradient"]) / float(run["old"]["gradient"])
