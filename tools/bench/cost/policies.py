"""fxamp-bench policies: the counted cost of each shipped policy, and its measured error compared with autocast's.

``fxamp-policy list`` prints these figures.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from fxamp.errors import OptionError
from fxamp.policy import Policy
from fxamp.policy.file.shipped import built_in_names, variant_names
from fxamp.tools.bench.cost.process import counts
from fxamp.tools.bench.cost.row import Row, extrapolated, row
from fxamp.tools.bench.cost.workload import Way, Workload
from fxamp.tools.bench.models import MODELS, require
from fxamp.tools.bench.report import Report, add_styles, drawn
from fxamp.tools.common.command_line import Parser, one_of
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import require_folder, write_text
from fxamp.tools.common.progress import bar

_TITLES = ("policy", "bytes moved", "bytes kept", "peak", "gradient error")
#: The counted model, in its full size, and the layers that are counted and extrapolated.
MODEL, LAYERS = "gpt2-124m", (2, 4)
_TINY = Path(__file__).with_name("tiny_gpt2.py")


@dataclass(frozen=True)
class Figures:
    """Ratios of one policy, None where there is none.

    ``bytes``: what a step moves; ``kept``: what the forward keeps for the backward; ``peak``: the most at once; each
    over torch.compile + autocast's. ``error``: of the gradient against float64, over autocast's.
    """

    bytes: float | None = None
    kept: float | None = None
    peak: float | None = None
    error: float | None = None

    def content(self) -> dict[str, float]:
        """Return the ratios that there are, to three digits after the point."""
        return {name: round(ratio, 3) for name, ratio in asdict(self).items() if ratio is not None}


def parser(prog: str) -> Parser:
    """Return the parser of this command's options."""
    what = "Count what a step of GPT-2 costs under each CUDA policy, and measure the error of each CPU policy."
    result = Parser(prog, what)
    names = (*built_in_names(), *variant_names())
    result.add_argument(
        "--policy", type=one_of(*names), action="append", help="a shipped policy; may be repeated (all)"
    )
    result.add_argument("--output", metavar="FILE", help="write the figures to this file, as policies/figures.json")
    add_styles(result)
    return result


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Count and run every policy. Raises FxampError for a user's mistake, and where this machine cannot count."""
    require(MODEL)
    require_folder(options.output)
    names = options.policy or [*built_in_names(), *variant_names()]
    results: dict[str, Figures] = {}
    with bar("policies", len(names), "policy") as shown, so_far(lambda: _table(_document(results)) if results else ""):
        for name, own in figures(names):
            say(f"{name}: {own.content()}")
            results[name] = own
            shown.update()
    document = _document(results)
    if options.output:
        write_text(json.dumps(document, indent=1) + "\n", options.output)
    return Report(document, _table(document), _table(document, markdown=True))


def _table(document: Mapping[str, Any], markdown: bool = False) -> str:
    rows = [(name, *_cells(ratios)) for name, ratios in document["policies"].items()]
    return f"{drawn(rows, _TITLES, markdown)}\n\n{document['about']}"


def _document(results: Mapping[str, Figures]) -> dict[str, Any]:
    layers = MODELS[MODEL].sizes["full"]["layers"]
    about = (
        f"Bytes moved, bytes kept for the backward, and their peak: of a training step of {MODEL} that returns the "
        f"loss alone ({layers} layers, extrapolated from {LAYERS[0]} and {LAYERS[1]}), over those of torch.compile + "
        "autocast; counted, not measured. Other versions of torch give other counts. Error: of the gradient of a "
        "tiny GPT-2 against float64, over autocast's, on a CPU."
    )
    versions = {name: version(name).partition("+")[0] for name in ("torch", "transformers")}
    return {"about": about, "versions": versions, "policies": {name: own.content() for name, own in results.items()}}


def _cells(content: Mapping[str, float]) -> list[str]:
    return [f"{content[name]:.3f}" if name in content else "" for name in ("bytes", "kept", "peak", "error")]


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
    counted = counts(
        (Workload(MODEL, dtype=dtype, sizes={**full, "layers": layers}, loss_only=True), Way(policy))
        for policy, dtype in ways
        for layers in LAYERS
    )
    torch: dict[str, Row] = {}
    for policy, dtype in ways:
        label = Way(policy).label
        rows = [row(label, policy, count) for count in islice(counted, len(LAYERS))]
        ours = extrapolated(LAYERS, rows, full["layers"])
        if policy:
            base = torch[dtype]
            yield Figures(ours.bytes / base.bytes, ours.kept / base.kept, ours.peak / base.peak)
        else:
            torch[dtype] = ours


def _error(policy: str, autocast: str) -> float:
    """Return the gradient error of ``policy`` over that of the policy that equals autocast, by ``fxamp-diff --run``."""
    command = [sys.executable, "-m", "fxamp.tools.diff.command", autocast, policy]
    done = subprocess.run(
        [*command, "--run", str(_TINY), "--format", "json"], capture_output=True, text=True, check=False
    )
    if not done.stdout:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise OptionError(f"fxamp-diff {autocast} {policy}: {lines[-1]}")
    (run,) = json.loads(done.stdout)["runs"]
    return float(run["new"]["gradient"]) / float(run["old"]["gradient"])
