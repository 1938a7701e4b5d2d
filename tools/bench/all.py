"""fxamp-bench all: every measurement, written into a folder as JSON, Markdown and charts."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fxamp.dtypes import DTYPES as LOWER_DTYPES
from fxamp.errors import OptionError
from fxamp.tools.bench import show
from fxamp.tools.bench.check import command as check
from fxamp.tools.bench.cost import command as cost
from fxamp.tools.bench.kernels import command as kernels
from fxamp.tools.bench.optimizers import command as optimizers
from fxamp.tools.bench.passes import command as passes
from fxamp.tools.bench.policies import command as policies
from fxamp.tools.bench.report import Report
from fxamp.tools.bench.step import command as step
from fxamp.tools.bench.train import command as train
from fxamp.tools.bench.train.contenders import BASELINES
from fxamp.tools.bench.train.experiment import DTYPES
from fxamp.tools.bench.train.models import MODELS
from fxamp.tools.common.command_line import Parser, guarded, one_of, positive
from fxamp.tools.common.output import put, write_text
from fxamp.tools.common.progress import say

PROG = "fxamp-bench all"
#: By device: the default dtypes of the trainings. A CPU has one that is worth measuring: fxamp's choice.
_DTYPES = {"cpu": ("auto",), "cuda": LOWER_DTYPES}


class _Subcommand(Protocol):
    def parser(self, prog: str) -> Parser: ...

    def run(self, given: argparse.Namespace, say: Callable[[str], None]) -> Report: ...


@dataclass(frozen=True)
class _Task:
    """One measurement: the name of its files, the module of the subcommand that makes it, and the options it gets."""

    name: str
    subcommand: _Subcommand
    arguments: Sequence[str]


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status: 1 if a contender failed, 2 after a user's mistake."""
    given = _parser().parse_args(arguments)
    failed: list[str] = []
    return guarded(PROG, lambda: failed.extend(_all(given))) or int(bool(failed))


def _parser() -> Parser:
    result = Parser(
        PROG, "Measure everything into a folder. Files that it holds already are kept, so a second call continues."
    )
    add = result.add_argument
    add("--output", type=Path, required=True, help="the folder, created if necessary")
    add("--device", type=one_of(*BASELINES), default="cpu", help="cpu (default) or cuda")
    add("--parts", type=_listed(tuple(PARTS)), default=tuple(PARTS), help=f"of {','.join(PARTS)} (default all)")
    add("--models", type=_listed(tuple(MODELS)), default=tuple(MODELS), help=f"of {','.join(MODELS)} (default all)")
    add("--dtypes", type=_listed(DTYPES), help="of auto,float16,bfloat16 (default: auto on cpu, both others on cuda)")
    add("--size", type=one_of("tiny", "full"), help="of the models (default: tiny on cpu, full on cuda)")
    add("--steps", type=positive, default=10, help="measured steps of a contender in a round (default 10)")
    add("--rounds", type=positive, default=10, help="rounds of the trainings (default 10)")
    add("--contenders", help="as fxamp-bench train takes them (default all)")
    add("--lowering", help="as fxamp-bench train takes it (default inductor)")
    add("--optimizers", help="as fxamp-bench optimizers takes them (default all)")
    return result


def _listed(accepted: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return an argparse ``type``: some of ``accepted``, separated by commas, each once."""
    check = one_of(*accepted)
    return lambda text: tuple(dict.fromkeys(check(part.strip()) for part in text.split(",")))


def _all(given: argparse.Namespace) -> list[str]:
    """Make the measurements that the folder lacks, and write the summary; return the names of those that failed."""
    tasks = [task for part in given.parts for task in PARTS[part](given)]
    parsed = [task.subcommand.parser(PROG).parse_args(task.arguments) for task in tasks]  # mistakes come first
    folder: Path = given.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--output {folder}: {error.strerror}") from error
    failed = []
    for number, (task, options) in enumerate(zip(tasks, parsed, strict=True), start=1):
        if (folder / f"{task.name}.json").exists():
            say(f"{number}/{len(tasks)} {task.name}: the folder has it already")
            continue
        say(f"{number}/{len(tasks)} {task.name}")
        report = task.subcommand.run(options, say)
        _write_files(folder / task.name, report)
        failed += [task.name] if report.failed else []
    texts = [path.read_text() for path in sorted(folder.glob("*.md")) if path.name != "summary.md"]
    write_text("\n\n".join(texts), str(folder / "summary.md"))
    put(f"{len(tasks)} measurements are in {folder}, their tables in {folder / 'summary.md'}")
    return failed


def _check(given: argparse.Namespace) -> Iterator[_Task]:
    small = ["--only=check and unscale"] if given.size == "tiny" else []
    yield _Task("check", check, [*_options(given, "device", "lowering"), *small])


def _train(given: argparse.Namespace) -> Iterator[_Task]:
    for model in given.models:
        for dtype in given.dtypes or _DTYPES[given.device]:
            options = _options(given, "device", "size", "steps", "rounds", "contenders", "lowering")
            yield _Task(f"train-{model}-{dtype}", train, [f"--model={model}", f"--dtype={dtype}", *options])


def _optimizers(given: argparse.Namespace) -> Iterator[_Task]:
    yield _Task("optimizers", optimizers, [*_options(given, "device", "optimizers"), *_step_lowering(given)])


def _step(given: argparse.Namespace) -> Iterator[_Task]:
    small = ["--parameters=16", "--rounds=2"] if given.size == "tiny" else []
    yield _Task("step", step, [*_options(given, "device"), *_step_lowering(given), *small])


def _step_lowering(given: argparse.Namespace) -> list[str]:
    """A compiled step has no eager lowering; aot_eager is the closest."""
    return ["--lowering=aot_eager"] if given.lowering == "eager" else _options(given, "lowering")


def _kernels(given: argparse.Namespace) -> Iterator[_Task]:
    small = ["--sizes=10000", "--rounds=5"] if given.size == "tiny" else []
    for dtype in ("float16", "float32"):
        yield _Task(f"kernels-{dtype}", kernels, [f"--dtype={dtype}", *_options(given, "device"), *small])


def _passes(given: argparse.Namespace) -> Iterator[_Task]:
    yield _Task("passes", passes, ["--sizes=100,400", "--model-layers=0"] if given.size == "tiny" else [])


def _show(given: argparse.Namespace) -> Iterator[_Task]:
    yield _Task("show", show, ["--sizes=100,400"] if given.size == "tiny" else [])


def _cost(given: argparse.Namespace) -> Iterator[_Task]:
    """Counted for a GPU on every device."""
    layers = ["--layers=1"] if given.size == "tiny" else []
    for model in given.models:
        for dtype in (each for each in given.dtypes or LOWER_DTYPES if each != "auto"):
            yield _Task(f"cost-{model}-{dtype}", cost, [f"--model={model}", f"--dtype={dtype}", *layers])


def _policies(given: argparse.Namespace) -> Iterator[_Task]:
    some = ["--policy=cpu-bfloat16-fast-norms"] if given.size == "tiny" else []
    yield _Task("policies", policies, some)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[_Task]]] = {
    "check": _check,
    "train": _train,
    "optimizers": _optimizers,
    "step": _step,
    "kernels": _kernels,
    "passes": _passes,
    "show": _show,
    "cost": _cost,
    "policies": _policies,
}
"""The measurements of every other subcommand, by its name."""


def _options(given: argparse.Namespace, *names: str) -> list[str]:
    """Those options of ``names`` that have a value, for another subcommand's parser."""
    return [f"--{name}={getattr(given, name)}" for name in names if getattr(given, name)]


def _write_files(stem: Path, report: Report) -> None:
    """Write what there is; the JSON comes last and shows that the measurement is complete."""
    for suffix, text in ((".md", report.markdown), (".svg", report.chart), (".json", report.json)):
        if text is not None:
            write_text(text.rstrip("\n") + "\n", str(stem.with_name(stem.name + suffix)))
