"""The command-line options for the device and versions that a policy is resolved for."""

from argparse import Namespace

from fxamp.policy import Policy
from fxamp.tools.common.command_line import Parser
from fxamp.tools.common.output import notice


def add_place(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--device", metavar="D", help="the device; a policy for another device is an error")
    add("--torch", metavar="V", help="a version of torch; that of the installed one unless given")
    add("--capability", metavar="C", help="the compute capability of an NVIDIA GPU, such as 8.0")
    add("--arch", metavar="A", help="the architecture of an AMD GPU, such as gfx950")
    add("--cpu-features", metavar="F,F", help="the features of a CPU, such as avx512_bf16,amx_bf16")


def resolved(prog: str, name: str, given: Namespace) -> Policy:
    """Return the policy resolved for the given options; reports unchecked conditions on stderr."""
    features = None if given.cpu_features is None else given.cpu_features.split(",")
    policy = Policy.load(name).resolve(
        given.device, given.torch, capability=given.capability, arch=given.arch, cpu_features=features
    )
    for condition in policy.unchecked:
        notice(f"{prog}: [match] {condition}: not checked, because the place's is not given")
    return policy
