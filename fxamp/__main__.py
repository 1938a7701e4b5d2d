"""``python -m fxamp``: the versions, the policy that "auto" takes on each device of this machine, and the tools."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

import fxamp
from fxamp.backend import policy_choice
from fxamp.backend.options import Options
from fxamp.devices import DEVICES
from fxamp.tools.common.output import put
from fxamp.tools.common.silence import unlogged

#: The commands, each with the question that it answers.
TOOLS = {
    "fxamp-demo": "trains a small GPT in float32 and through fxamp, and draws both curves",
    "fxamp-show": "which dtype each op runs in, why, and what it costs; no GPU needed",
    "fxamp-policy": "lists, checks and explains policies; proposes one from the ranges of your model",
    "fxamp-diff": "how two policies differ: in decisions, on a graph, in error against float64",
    "fxamp-bench": "time, memory and counted cost compared with torch.autocast and GradScaler",
}


def overview() -> Iterator[str]:
    """Yield the lines of the overview."""
    yield f"fxamp {fxamp.__version__}: mixed precision as a torch.compile backend"
    yield ""
    yield f"  python  {platform.python_version()}"
    yield f"  torch   {torch.__version__}"
    yield f"  triton  {_triton()}"
    yield ""
    yield 'options={"policy": "auto"} chooses on this machine'
    for device in devices():
        with unlogged():
            choice = policy_choice.choose_policy(Options(), [torch.empty(0, device=device)])
        name = "float32, no casts" if choice.policy is None else choice.policy.name
        small = "; float32 for a graph whose products are too small to gain" if choice.if_it_pays else ""
        yield f"  {device:6}  {name}: {choice.why}{small}"
    yield ""
    yield "commands, each with --help"
    yield from (f"  {name:13} {purpose}" for name, purpose in TOOLS.items())


def devices() -> list[str]:
    """Return the devices of this machine that policies exist for: the CPU, and the accelerator that torch finds."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = {"cpu", accelerator.type if accelerator is not None else "cpu"}
    return [device for device in DEVICES if device in kinds]


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "not installed: gradient kernels need it on GPUs"


if __name__ == "__main__":
    put("\n".join(overview()))
