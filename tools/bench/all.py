"""fxamp-bench all: every measurement, written into a folder as JSON, Markdown and charts."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fxamp.dtypes import DTYPES as LOWER_DTYPES
from fxamp.errors import OptionError
from fxamp.tools.bench.check import command as check
from fxamp.tools.bench.cost import command as cost
from fxamp.tools.bench.cost import policies
from fxamp.tools.bench.cost.kernels import command as kernels
from fxamp.tools.bench.models import MODELS
from fxamp.tools.bench.report import Report, some_of
from fxamp.tools.bench.train import command as train
from fxamp.tools.bench.train import step
from fxamp.tools.bench.train.experiment import BASELINES, DTYPES
from fxamp.tools.common.command_line import Parser, one_of, positive
from fxamp.tools.common.output import write_text

#: A part of the measurements -> the module of the subcommand that makes it.
PARTS = {"check": check, "train": train, "step": step, "kernels": kernels, "cost": cost, "policies": policies}
#: By device: the default dtypes of the trainings. A CPU has one that is worth measuring: fxamp's choice.
_DTYPES = {"cpu": ("auto",), "cuda": LOWER_DTYPES}
#: By part: the options that make it small.
_SMALL = {
    "check": ["--only=check and unscale"],
    "step": ["--parameters=16", "--rounds=2", "--steps=1"],
    "kernels": ["--arch=sm_90"],
    "cost": ["--layers=1"],
    "policies": ["--policy=cpu-bfloat16-fast-norms"],
}


class _Task(NamedTuple):
    """One measurement: the name of its files, its part, and the options that the part's subcommand gets."""

    name: str
    part: str
    arguments: Sequence[str]


def parser(prog: str) -> Parser:
    """The options of this command."""
    result = Parser(
        prog, "Measure everything into a folder. Files that it holds already are kept, so a second call continues."
    )
    add = result.add_argument
    add("--output", type=Path, required=True, help="the folder, created if necessary")
    add("--device", type=one_of(*BASELINES), default="cpu", help="cpu (default) or cuda")
    add("--parts", type=some_of(*PARTS), default=tuple(PARTS), help=f"of {','.join(PARTS)} (default all)")
    add("--models", type=some_of(*MODELS), default=tuple(MODELS), help=f"of {','.join(MODELS)} (default all)")
    add("--dtypes", type=some_of(*DTYPES), help="of auto,float16,bfloat16 (default: auto on cpu, both others on cuda)")
    add("--size", type=one_of("tiny", "full"), help="of the models (default: tiny on cpu, full on cuda)")
    add("--steps", type=positive, default=10, help="measured steps of a contender in a round (default 10)")
    add("--rounds", type=positive, default=10, help="rounds of the trainings (default 10)")
    add("--contenders", help="as fxamp-bench train takes them (default all)")
    add("--lowering", help="as fxamp-bench train takes it (default inductor)")
    return result


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Make the measurements that the folder lacks, and write the summary. Raises FxampError for a user's mistake."""
    tasks = [task for part in options.parts for task in _tasks(part, options)]
    parsed = [PARTS[task.part].parser("fxamp-bench all").parse_args(task.arguments) for task in tasks]
    folder: Path = options.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--output {folder}: {error.strerror}") from error
    failed: list[str] = []
    for number, (task, own) in enumerate(zip(tasks, parsed, strict=True), start=1):
        if (folder / f"{task.name}.json").exists():
            say(f"{number}/{len(tasks)} {task.name}: the folder has it already")
            continue
        say(f"{number}/{len(tasks)} {task.name}")
        report = PARTS[task.part].run(own, say)
        _write_files(folder / task.name, report)
        failed += [task.name] if report.failed else []
    texts = [path.read_text() for path in sorted(folder.glob("*.md")) if path.name != "summary.md"]
    write_text("\n\n".join(texts), str(folder / "summary.md"))
    text = f"{len(tasks)} measurements are in {folder}, their tables in {folder / 'summary.md'}"
    return Report({}, text, text, failed=tuple(failed))


def _tasks(part: str, options: argparse.Namespace) -> Iterator[_Task]:
    """The measurements of one part; what is counted for a GPU is counted on every device."""
    small = _SMALL.get(part, []) if options.size == "tiny" else []
    here = [] if part in ("kernels", "cost", "policies") else _values(options, "device", "lowering")
    if part == "train":
        here += _values(options, "size", "steps", "rounds", "contenders")
        dtypes = options.dtypes or _DTYPES[options.device]
    elif part == "cost":
        dtypes = [dtype for dtype in options.dtypes or LOWER_DTYPES if dtype != "auto"]
    else:
        if part == "step" and options.lowering == "eager":  # a compiled step has none; aot_eager is the closest
            here = [*_values(options, "device"), "--lowering=aot_eager"]
        yield _Task(part, part, [*here, *small])
        return
    for model in options.models:
        for dtype in dtypes:
            yield _Task(f"{part}-{model}-{dtype}", part, [f"--model={model}", f"--dtype={dtype}", *here, *small])


def _values(options: argparse.Namespace, *names: str) -> list[str]:
    """Those options of ``names`` that have a value, for another subcommand's parser."""
    return [f"--{name}={getattr(options, name)}" for name in names if getattr(options, name)]


def _write_files(stem: Path, report: Report) -> None:
    """Write what there is; the JSON comes last and shows that the measurement is complete."""
    for suffix, text in ((".md", report.markdown), (".svg", report.chart), (".json", report.json)):
        if text is not None:
            write_text(text.rstrip("\n") + "\n", str(stem.with_name(stem.name + suffix)))
