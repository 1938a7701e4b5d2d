"""fxamp-policy explain: the rule that decides a call, the rules it overrides, and those whose conditions fail."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from fxamp.errors import OptionError
from fxamp.policy.model.op_names import canonical
from fxamp.policy.model.site import REGIONS
from fxamp.tools.common.command_line import Parser, guarded, natural, one_of
from fxamp.tools.common.output import put
from fxamp.tools.policy.explain_text import explain
from fxamp.tools.policy.place import add_place, resolved
from fxamp.tools.policy.site_arguments import site_from

PROG = "fxamp-policy explain"


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status: 0, or 2 after a user's mistake."""
    given = _parser().parse_args(arguments)
    return guarded(PROG, lambda: _explain(given))


def _parser() -> Parser:
    parser = Parser(PROG, "Say which rule decides a call of an op, and why. Facts that are not given are unknown.")
    add = parser.add_argument
    add("op", metavar="OP", help="an op's name, as policies write it: mm, aten.mm, sum.dim_IntList, mylib::op")
    add("--policy", metavar="P", required=True, help="a path to a .toml file, or a built-in name")
    add("--module", metavar="PATH", default="", help="the dotted path of the module that calls it")
    add(
        "--class", metavar="C", dest="classes", action="append", default=[], help="a module class around it; repeatable"
    )
    add(
        "--region",
        type=one_of(*REGIONS),
        default="forward",
        help="forward (default), backward, or kept: how its result waits for the backward",
    )
    add("--arg", metavar="A", dest="args", action="append", default=[], help="dim=-1, self.size=4096; repeatable")
    add("--reduces", metavar="N", type=natural, help="how many elements go into one result of a reduction")
    add("--elements", metavar="N", type=natural, help="of a kept value: how many elements it has")
    add("--read-by", metavar="OP", dest="readers", action="append", default=[], help="of a kept value; repeatable")
    add_place(parser)
    return parser


def _explain(given: Namespace) -> None:
    try:
        site = site_from(given.op, given.module, given.classes, given.region, given.args, given.reduces)
        site = replace(site, elements=given.elements, readers=tuple(map(canonical, given.readers)))
    except ValueError as error:
        raise OptionError(str(error)) from error
    put(explain(resolved(PROG, given.policy, given), site))
