"""fxamp-bench policies: what each shipped policy costs by the count, and its error beside autocast's."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from tabulate import tabulate

from fxamp.policy.file.shipped import built_in_names, variant_names
from fxamp.tools.bench.policies.figures import LAYERS, MODEL, Figures, figures
from fxamp.tools.bench.report import Report, add_styles
from fxamp.tools.bench.train.models import MODELS, require
from fxamp.tools.common.command_line import Parser, guarded, one_of
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import put, require_folder, write_text
from fxamp.tools.common.progress import bar, say

PROG = "fxamp-bench policies"
_TITLES = ("policy", "bytes moved", "bytes kept", "gradient error")


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status."""
    given = parser(PROG).parse_args(arguments)
    return guarded(PROG, lambda: put(run(given, say).text(given)))


def parser(prog: str) -> Parser:
    """Return the parser of this command's options."""
    what = "Count what GPT-2's step costs under each policy for CUDA, and run each for CPUs for its error."
    result = Parser(prog, what)
    names = (*built_in_names(), *variant_names())
    result.add_argument(
        "--policy", type=one_of(*names), action="append", help="a shipped policy; may be repeated (all)"
    )
    result.add_argument("--output", metavar="FILE", help="write the figures there, as policies/figures.json holds them")
    add_styles(result)
    return result


def run(given: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Count and run every policy. Raises FxampError for a user's mistake, and where this machine cannot count."""
    require(MODEL)
    require_folder(given.output)
    names = given.policy or [*built_in_names(), *variant_names()]
    found: dict[str, Figures] = {}
    with bar("policies", len(names), "policy") as shown, so_far(lambda: _table(_document(found)) if found else ""):
        for name, made in figures(names):
            say(f"{name}: {made.content()}")
            found[name] = made
            shown.update()
    document = _document(found)
    if given.output:
        write_text(json.dumps(document, indent=1) + "\n", given.output)
    return Report(document, _table(document), _table(document, "github"))


def _table(document: Mapping[str, Any], style: str = "simple") -> str:
    rows = [(name, *_cells(ratios)) for name, ratios in document["policies"].items()]
    return f"{tabulate(rows, _TITLES, tablefmt=style, disable_numparse=True)}\n\n{document['about']}"


def _document(found: Mapping[str, Figures]) -> dict[str, Any]:
    layers = MODELS[MODEL].sizes["full"]["layers"]
    about = (
        f"Bytes: of a training step of {MODEL} ({layers} layers, extrapolated from {LAYERS[0]} and {LAYERS[1]}), over "
        "those of torch.compile + autocast; counted, not measured. Error: of the gradient of a tiny GPT-2 against "
        "float64, over autocast's, on a CPU."
    )
    versions = {name: version(name).partition("+")[0] for name in ("torch", "transformers")}
    return {"about": about, "versions": versions, "policies": {name: made.content() for name, made in found.items()}}


def _cells(content: Mapping[str, float]) -> list[str]:
    return [f"{content[name]:.3f}" if name in content else "" for name in ("bytes", "kept", "error")]
