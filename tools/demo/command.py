"""fxamp-demo: train a small GPT in float32 and in mixed precision, and show both side by side.

The text is the source of Python's own standard library. Everything but the backend is the same for both: the model,
the seed, the batches, the optimizer, whose state a policy with an ``[optimizer]`` table keeps in fewer bits. Started by
torchrun, with --ddp or --fsdp, several processes train one model.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from fxamp.dtypes import SCALED_DTYPES
from fxamp.errors import OptionError
from fxamp.lowering_names import LOWERINGS
from fxamp.optim.compile_optimizer import compile_optimizer
from fxamp.policy import OptimizerPrecision, Policy
from fxamp.scaler import GradScaler
from fxamp.tools.common import charts
from fxamp.tools.common.charts import Curve, line_chart, smooth
from fxamp.tools.common.command_line import Parser, guarded, one_of, positive
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.output import put, require_folder, write_text
from fxamp.tools.demo.model import Size
from fxamp.tools.demo.ranks import Ranks, joined
from fxamp.tools.demo.table import table, verdict
from fxamp.tools.demo.text import VOCABULARY, Text, standard_library
from fxamp.tools.demo.train import TrainingResult, TrainingSettings, train

_TINY = Size(layers=2, heads=4, width=64, length=64, vocabulary=VOCABULARY)
#: GPT-2's smallest: 124 million parameters, and 39 million in a head of its own. The text uses 256 tokens; the
#: vocabulary is GPT-2's, rounded up to a multiple of 64, so that the last matrix product has its real cost.
_REAL = Size(layers=12, heads=12, width=768, length=1024, vocabulary=50304)

#: By device: what is trained there, and the policy.
_SETTINGS = {
    "cpu": (TrainingSettings(_TINY, batch=8, steps=120, rate=3e-3, device="cpu", seed=0), "cpu-bfloat16"),
    "cuda": (TrainingSettings(_REAL, batch=8, steps=200, rate=3e-4, device="cuda", seed=0), "auto"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 after a user's mistake."""
    options = _parser().parse_args(arguments)
    return guarded("fxamp-demo", lambda: _demo(options))


def _parser() -> Parser:
    parser = Parser("fxamp-demo", "Train a small GPT in float32 and through fxamp, from the same seed, and compare.")
    parser.add_argument(
        "--device", type=one_of(*_SETTINGS), default="cpu", help="cpu (a tiny model) or cuda (GPT-2's size)"
    )
    parser.add_argument(
        "--policy",
        help='built-in name, .toml file, or "auto" (cpu-bfloat16 on cpu, auto on cuda); float16 adds a scaler',
    )
    parser.add_argument("--lowering", type=one_of(*LOWERINGS), help="inductor (default), aot_eager or eager")
    parser.add_argument("--steps", type=positive, help="training steps: 120 on cpu, 200 on cuda")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches (default 0)")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads; 1 gives steady times (default)")
    parser.add_argument("--picture", type=Path, default=Path("fxamp-demo.svg"), help="where the loss curves go (SVG)")
    spread = parser.add_mutually_exclusive_group()
    for kind, what in (("ddp", "average gradients"), ("fsdp", "shard the parameters")):
        start = f"torchrun --nproc-per-node 2 $(which fxamp-demo) --{kind}"
        spread.add_argument(f"--{kind}", action="store_const", const=kind, dest="kind", help=f"{what}: {start}")
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    settings, policy = _chosen(arguments)
    with joined(arguments.kind or "", settings.device, settings.batch) as ranks, _output(ranks) as stream:
        lowering = arguments.lowering or _usable_lowering(settings.device, stream)
        text = standard_library()
        _describe(settings, policy, text, ranks, stream)
        before = torch.get_num_threads()
        torch.set_num_threads(arguments.threads)
        try:
            reference = train("float32", settings, text, {"backend": lowering}, stream, None, ranks)
            options: dict[str, Any] = {"policy": policy, "lowering": lowering}
            scaler = _scaler(policy, settings.device)
            if scaler is not None:
                options["scaler"] = scaler
            with so_far(lambda: f"float32: {settings.steps} steps, loss {reference.last:.3f}"):
                compiler = {"backend": "fxamp", "options": options}
                prepare = partial(_prepared, policy, lowering)
                other = train("fxamp", settings, text, compiler, stream, scaler, ranks, prepare)
        finally:
            torch.set_num_threads(before)
        if ranks.first:
            put(f"{table(reference, other)}\n\n{verdict(reference, other, settings.device)}")
            put(_pictured(arguments.picture, reference, other))


def _output(ranks: Ranks) -> AbstractContextManager[TextIO]:
    """Return the stream for progress: of the first process alone."""
    return nullcontext(sys.stderr) if ranks.first and sys.stderr is not None else Path(os.devnull).open("w")


def _describe(settings: TrainingSettings, policy: str, text: Text, ranks: Ranks, stream: TextIO) -> None:
    size, steps, batch = settings.size, settings.steps, settings.batch
    print(f"text: {text.files} files of {text.folder}, {len(text.train) / 1e6:.1f} MB to train on", file=stream)
    print(
        f"model: {size.layers} layers, width {size.width}; {steps} steps of {batch} x {size.length} bytes",
        file=stream,
    )
    precision = _precision(policy)
    if precision is not None:
        choices = ", ".join(f"{name} {value}" for name, value in precision.content().items())
        print(f"optimizer of fxamp's column: {choices}", file=stream)
    if ranks.kind:
        print(f"processes: {ranks.count} ({ranks.kind}), {batch // ranks.count} passages a step each", file=stream)


def _chosen(arguments: argparse.Namespace) -> tuple[TrainingSettings, str]:
    """Return the settings and the policy, checked before training starts."""
    settings, policy = _SETTINGS[arguments.device]
    changes: dict[str, Any] = {"steps": arguments.steps or settings.steps, "seed": arguments.seed}
    policy = arguments.policy or policy
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: this machine has no CUDA device that torch can use; accepted here: cpu")
    if policy != "auto":
        Policy.load(policy).resolve(arguments.device)
    require_folder(str(arguments.picture), arguments.policy, option="--picture")
    return TrainingSettings(**{**vars(settings), **changes}), policy


def _scaler(policy: str, device: str) -> GradScaler | None:
    """Return a scaler if the policy computes in float16, where gradients underflow without one."""
    if policy == "auto" or Policy.load(policy).lower_precision_fp not in SCALED_DTYPES:
        return None
    return GradScaler(device)


def _precision(policy: str) -> OptimizerPrecision | None:
    """Return how the policy wants the optimizer's state and the weights kept, if not as the optimizer makes them."""
    precision = None if policy == "auto" else Policy.load(policy).optimizer
    return None if precision == OptimizerPrecision() else precision


def _prepared(policy: str, lowering: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Compile the optimizer's step if the policy has an ``[optimizer]`` table."""
    if _precision(policy) is None:
        return optimizer
    return compile_optimizer(optimizer, policy, lowering="aot_eager" if lowering == "eager" else lowering)


def _usable_lowering(device: str, stream: TextIO) -> str:
    """Return Inductor if it can compile for this CPU; else AOTAutograd alone, and say so."""
    from fxamp.torch_private.parts.inductor import InvalidCxxCompiler, get_cpp_compiler

    if device != "cpu":
        return "inductor"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        print("no C++ compiler found, which Inductor needs on a CPU: both runs use aot_eager", file=stream)
        return "aot_eager"
    return "inductor"


def _pictured(file: Path, reference: TrainingResult, other: TrainingResult) -> str:
    """Write the picture, if it can be drawn here; return the line that says so."""
    if not charts.available():
        return f"No picture of the loss curves: {charts.MISSING}"
    write_text(picture(reference, other), str(file))
    return f"The loss curves are in {file}"


def picture(reference: TrainingResult, other: TrainingResult) -> str:
    """Return both loss curves as SVG; each point is the mean of the last ten steps."""
    policy = other.records[0].policy if other.records else "float32"
    curves = (
        Curve(reference.label, smooth(reference.losses, 10), "#f4a261", 6),
        Curve(f"{other.label}, {policy}", smooth(other.losses, 10), "#1d3557", 1.8),
    )
    return line_chart("A small GPT learns Python", curves, "step", "loss, nats a byte (mean of 10 steps)")


if __name__ == "__main__":
    raise SystemExit(main())
