"""fxamp-policy list: the shipped policies, a line each: where they run, what they cost, and what they do."""

import json
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from fxamp.devices import DEVICES
from fxamp.policy import Policy
from fxamp.policy.file.paths import folder
from fxamp.policy.file.shipped import built_in_names, composition, variant_names
from fxamp.tools.common.command_line import Parser, one_of
from fxamp.tools.common.output import put
from fxamp.tools.common.table import Column, Layout, render
from fxamp.tools.common.terminal import look_of

_LAYOUT = Layout(
    (
        Column("policy"),
        Column("runs on"),
        Column("bytes", right=True),
        Column("kept", right=True),
        Column("peak", right=True),
        Column("error", right=True),
        Column("what it does", shorten="end", least=30),
    ),
    ["what it does"],
    ["runs on"],
)

#: The file of ratios that ``fxamp-bench policies --output`` writes, by policy.
FIGURES = "figures.json"

#: The width of the text below the table if there is no terminal.
_WIDTH = 120


def parser(prog: str) -> Parser:
    """Return the subcommand's options."""
    parser = Parser(prog, "List the shipped policies: where each runs, its counted cost, and what it does.")
    parser.add_argument("--device", metavar="D", type=one_of(*DEVICES), help="only the policies of this device")
    return parser


def run(options: Namespace) -> None:
    """Print the table."""
    figures = json.loads((folder() / FIGURES).read_text(encoding="utf-8"))
    names = sorted((*built_in_names(), *variant_names()))  # a variant follows what it varies
    rows = [row for name in names if (row := _row(name, options.device, figures["policies"]))]
    look = look_of(sys.stdout)
    lines = list(render(_LAYOUT, rows, look.width))
    if any(any(row[2:6]) for row in rows):
        about = f"{figures['about']} Made by fxamp-bench policies."
        lines += ["", *textwrap.wrap(about, look.width or _WIDTH, break_on_hyphens=False)]
    put("\n".join(lines))


def _row(name: str, device: str | None, figures: Mapping[str, Any]) -> tuple[str, ...] | None:
    policy, shipped = Policy.load(name), composition(name)
    assert shipped is not None
    if device not in (None, policy.device):
        return None
    ratios = (figures.get(name, {}).get(key) for key in ("bytes", "kept", "peak", "error"))
    cells = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    return name, " ".join(_conditions(policy)), *cells, shipped.purpose


def _conditions(policy: Policy) -> Iterator[str]:
    yield policy.device
    if policy.capability:
        yield f"capability {policy.capability}"
    if policy.arch:
        yield "or " + ", ".join(policy.arch) if policy.capability else "of " + ", ".join(policy.arch)
    if policy.cpu_features:
        yield "with " + ", ".join(policy.cpu_features)
