"""fxamp-policy show: print a resolved policy as one policy file, with comments on the origin of each line."""

from argparse import Namespace

from fxamp.policy import Policy
from fxamp.tools.common.command_line import Parser
from fxamp.tools.common.output import notice, write_text

PROG = "fxamp-policy show"


def parser(prog: str) -> Parser:
    """Return the subcommand's options."""
    parser = Parser(prog, "Print a policy merged with the files that it extends, with only the rules that apply here.")
    parser.add_argument("policy", metavar="P", help="a path to a .toml file, or a built-in name")
    add_machine(parser)
    return parser


def run(options: Namespace) -> None:
    """Print the policy."""
    policy = resolved(PROG, options.policy, options)
    head = f"# {policy.name}, merged with the files that it extends, with only the rules that apply here"
    write_text(f"{head}\n{policy.dumps(origins=True)}")


def add_machine(parser: Parser) -> None:
    """Add the options for the device and versions that a policy is resolved for."""
    add = parser.add_argument
    add("--device", metavar="D", help="the device; a policy for another device is an error")
    add("--torch", metavar="V", help="a version of torch; the installed one unless given")
    add("--capability", metavar="C", help="the compute capability of an NVIDIA GPU, such as 8.0")
    add("--arch", metavar="A", help="the architecture of an AMD GPU, such as gfx950")
    add("--cpu-features", metavar="F,F", help="the features of a CPU, such as avx512_bf16,amx_bf16")


def resolved(prog: str, name: str, options: Namespace) -> Policy:
    """Return the policy resolved for the machine of the options; reports unchecked conditions on stderr."""
    features = None if options.cpu_features is None else options.cpu_features.split(",")
    policy = Policy.load(name).resolve(
        options.device, options.torch, capability=options.capability, arch=options.arch, cpu_features=features
    )
    for condition in policy.unchecked:
        notice(f"{prog}: [match] {condition}: not checked, because the machine's is not given")
    return policy
