"""fxamp-demo: train a small GPT in float32, in mixed precision and with a lean policy, and show all side by side.

The text is the source of Python's own standard library. Everything but the backend is the same for all: the model, the
seed, the batches, the optimizer; with --policy-optimizer its state is kept as the policy's ``[optimizer]`` table says.
Started by torchrun, with --ddp or --fsdp, several processes train one model.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch

from fxamp.lowering_names import LOWERINGS
from fxamp.policy import Policy
from fxamp.tools.bench.report import require_device
from fxamp.tools.common import charts
from fxamp.tools.common.charts import Curve, line_chart, smooth
from fxamp.tools.common.command_line import Parser, guarded, one_of, positive
from fxamp.tools.common.interrupt import so_far
from fxamp.tools.common.machine import QUIET, load
from fxamp.tools.common.output import put, require_folder, write_text
from fxamp.tools.demo.columns import Column, columns_of, run, usable_lowering
from fxamp.tools.demo.ranks import Ranks, joined
from fxamp.tools.demo.sizes import REAL, SMALL, TINY
from fxamp.tools.demo.table import table, verdict
from fxamp.tools.demo.text import Text, standard_library
from fxamp.tools.demo.train import TrainingResult, TrainingSettings, stopped
from fxamp.torch_devices import native_bfloat16

#: By machine: what is trained there, and on how many CPU threads by default; None: as many as torch takes.
_USUAL = {
    "plain CPU": (TrainingSettings(TINY, batch=8, steps=120, rate=3e-3, device="cpu", seed=0), 1),
    "CPU": (TrainingSettings(SMALL, batch=4, steps=32, rate=1e-3, device="cpu", seed=0), None),
    "GPU": (TrainingSettings(REAL, batch=8, steps=200, rate=3e-4, device="cuda", seed=0), 1),
}
_POLICIES = {"cpu": "cpu-bfloat16", "cuda": "auto"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 after a user's mistake."""
    options = _parser().parse_args(arguments)
    return guarded("fxamp-demo", lambda: _demo(options))


def _parser() -> Parser:
    what = "Train a small GPT in float32, through fxamp, and through fxamp with a lean policy, and compare."
    parser = Parser("fxamp-demo", what)
    parser.add_argument("--device", type=one_of(*_POLICIES), default="cpu", help="cpu (default) or cuda (GPT-2's size)")
    parser.add_argument(
        "--policy",
        help='built-in name, .toml file, or "auto" (cpu-bfloat16 on cpu, auto on cuda); float16 adds a scaler',
    )
    optimizer = "keep the optimizer's state as the policies' [optimizer] tables say"
    parser.add_argument("--policy-optimizer", action="store_true", help=optimizer)
    parser.add_argument("--lowering", type=one_of(*LOWERINGS), help="inductor (default), aot_eager or eager")
    steps = "training steps (default 32; 120 of a tiny model on a CPU without bfloat16; 200 on cuda)"
    parser.add_argument("--steps", type=positive, help=steps)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the batches (default 0)")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's; 1 for the tiny model)")
    parser.add_argument("--picture", type=Path, default=Path("fxamp-demo.svg"), help="an SVG file for the loss curves")
    spread = parser.add_mutually_exclusive_group()
    for kind, what in (("ddp", "average gradients"), ("fsdp", "shard the parameters")):
        start = f"torchrun --nproc-per-node 2 $(which fxamp-demo) --{kind}"
        spread.add_argument(f"--{kind}", action="store_const", const=kind, dest="kind", help=f"{what}: {start}")
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    settings, threads, policy = _chosen(arguments)
    with joined(arguments.kind or "", settings.device, settings.batch) as ranks, _output(ranks) as stream:
        lowering = arguments.lowering or usable_lowering(settings.device, stream)
        columns = columns_of(policy, settings.device, lowering, arguments.policy_optimizer)
        text = standard_library()
        _describe(settings, columns, text, ranks, stream)
        runs: list[TrainingResult] = []
        with _threads(threads), so_far(lambda: "\n".join(stopped(run.label, run.losses) for run in runs)):
            for column in columns:
                runs.append(run(column, settings, text, ranks, stream))
        if ranks.first:
            put(f"{table(runs)}\n\n{_pictured(arguments.picture, runs)}\n")
            put(verdict(runs, settings.device))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Within the block, torch computes on this many CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _output(ranks: Ranks) -> AbstractContextManager[TextIO]:
    """Return the stream for progress: of the first process alone."""
    return nullcontext(sys.stderr) if ranks.first and sys.stderr is not None else Path(os.devnull).open("w")


def _describe(settings: TrainingSettings, columns: Sequence[Column], text: Text, ranks: Ranks, stream: TextIO) -> None:
    size, steps, batch = settings.size, settings.steps, settings.batch
    print(f"text: {text.files} files of {text.folder}, {len(text.train) / 1e6:.1f} MB to train on", file=stream)
    print(
        f"model: {size.layers} layers, width {size.width}; {steps} steps of {batch} x {size.length} bytes",
        file=stream,
    )
    if load() > QUIET:
        print(f"the machine has other work (load {load():.1f}): the speeds below cannot be compared", file=stream)
    for column in columns:
        if column.precision is not None:
            choices = ", ".join(f"{name} {value}" for name, value in column.precision.content().items())
            unused = "" if column.optimizer else ", in use with --policy-optimizer"
            print(f"optimizer of {column.label}: {choices}{unused}", file=stream)
    if ranks.kind:
        print(f"processes: {ranks.count} ({ranks.kind}), {batch // ranks.count} passages a step each", file=stream)


def _chosen(arguments: argparse.Namespace) -> tuple[TrainingSettings, int, str]:
    """Return the settings, the CPU threads and the policy, checked before training starts."""
    require_device(arguments.device)
    cpu = "CPU" if native_bfloat16("cpu") else "plain CPU"
    settings, threads = _USUAL["GPU" if arguments.device == "cuda" else cpu]
    policy = arguments.policy or _POLICIES[arguments.device]
    if policy != "auto":
        Policy.load(policy).resolve(arguments.device)
    require_folder(str(arguments.picture), arguments.policy, option="--picture")
    settings = replace(settings, steps=arguments.steps or settings.steps, seed=arguments.seed)
    return settings, arguments.threads or threads or torch.get_num_threads(), policy


def _pictured(file: Path, runs: Sequence[TrainingResult]) -> str:
    """Write the picture, if it can be drawn here; return the line that says so."""
    if not charts.available():
        return f"No picture of the loss curves: {charts.MISSING}"
    write_text(picture(runs), str(file))
    return f"The loss curves are in {file}"


#: Colours and thickness of the curves in points: thinner ones are drawn on top.
_PENS = (("#f4a261", 6.0), ("#1d3557", 2.5), ("#2a9d8f", 1.2))


def picture(runs: Sequence[TrainingResult]) -> str:
    """Return the loss curves as SVG; each point is the mean of the last ten steps."""
    curves = [
        Curve(_named(run), smooth(run.losses, 10), colour, thickness)
        for run, (colour, thickness) in zip(runs, _PENS, strict=True)
    ]
    return line_chart("A small GPT learns Python", curves, "step", "loss, nats a byte (mean of 10 steps)")


def _named(run: TrainingResult) -> str:
    """Return the name of a curve: the run's, and its policy's."""
    return f"{run.label}, {run.records[0].policy}" if run.records else run.label


if __name__ == "__main__":
    raise SystemExit(main())
