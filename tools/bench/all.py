"""fxamp-bench all: every measurement, written into a folder as JSON, Markdown and charts."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from fxamp.errors import OptionError
from fxamp.tools.bench.kernels import command as bench_kernels
from fxamp.tools.bench.passes import command as bench_passes
from fxamp.tools.bench.train import command as bench_train
from fxamp.tools.bench.train.contenders import BASELINES
from fxamp.tools.bench.train.plan import DTYPES
from fxamp.tools.bench.train.table import table
from fxamp.tools.common.command_line import Parser, guarded, one_of, positive

PROG = "fxamp-bench all"
_PARTS = ("train", "kernels", "passes")
_MODELS = ("mlp", "moe-tiny", "resnet50", "vit-b", "bert-base", "gpt2-124m")
#: By device: the dtypes of the trainings unless the user names others. A CPU without 16-bit units has one question.
_DTYPES = {"cpu": ("auto",), "cuda": ("float16", "bfloat16")}


@dataclass(frozen=True)
class _Task:
    """One measurement: the name of its files, and what writes them; that returns whether all of it worked."""

    name: str
    run: Callable[[Path], bool]


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit status: 1 if a contender failed, 2 after a user's mistake."""
    given = _parser().parse_args(arguments)
    failed: list[str] = []
    return guarded(PROG, lambda: failed.extend(_all(given))) or int(bool(failed))


def _parser() -> Parser:
    result = Parser(
        PROG, "Measure everything into a folder. What the folder holds already is kept, so a second call goes on."
    )
    add = result.add_argument
    add("--output", type=Path, required=True, help="the folder, made if need be")
    add("--device", type=one_of(*BASELINES), default="cpu", help="cpu (default) or cuda")
    add("--parts", type=_listed(_PARTS), default=_PARTS, help=f"of {','.join(_PARTS)} (default all)")
    add("--models", type=_listed(_MODELS), default=_MODELS, help=f"of {','.join(_MODELS)} (default all)")
    add("--dtypes", type=_listed(DTYPES), help="of auto,float16,bfloat16 (default: auto on cpu, both others on cuda)")
    add("--size", type=one_of("tiny", "full"), help="of the models (default: tiny on cpu, full on cuda)")
    add("--steps", type=positive, default=10, help="measured steps of a contender in a round (default 10)")
    add("--rounds", type=positive, default=10, help="rounds of the trainings (default 10)")
    add("--contenders", help="as fxamp-bench train takes them (default all)")
    add("--lowering", help="as fxamp-bench train takes it (default inductor)")
    return result


def _listed(accepted: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """An argparse ``type``: some of ``accepted`` with commas between them, each once."""
    check = one_of(*accepted)
    return lambda text: tuple(dict.fromkeys(check(part.strip()) for part in text.split(",")))


def _all(given: argparse.Namespace) -> list[str]:
    """Measure what the folder lacks, and write the summary; returns the names of what did not work."""
    folder: Path = given.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--output {folder}: {error.strerror}") from error
    tasks = list(_tasks(given))
    failed = []
    for number, task in enumerate(tasks, start=1):
        if (folder / f"{task.name}.json").exists():
            _say(f"{number}/{len(tasks)} {task.name}: the folder holds it already")
            continue
        _say(f"{number}/{len(tasks)} {task.name}")
        failed += [] if task.run(folder) else [task.name]
    texts = [path.read_text() for path in sorted(folder.glob("*.md")) if path.name != "summary.md"]
    (folder / "summary.md").write_text("\n\n".join(texts))
    print(f"{len(tasks)} measurements are in {folder}, their tables in {folder / 'summary.md'}")
    return failed


def _tasks(given: argparse.Namespace) -> Iterator[_Task]:
    dtypes = given.dtypes or _DTYPES[given.device]
    if "train" in given.parts:
        for model in given.models:
            for dtype in dtypes:
                yield _Task(f"train-{model}-{dtype}", _training(model, dtype, given))
    if "kernels" in given.parts:
        for dtype in ("float16", "float32"):
            yield _Task(f"kernels-{dtype}", _kernels(dtype, given))
    if "passes" in given.parts:
        yield _Task("passes", _passes(given))


def _training(model: str, dtype: str, given: argparse.Namespace) -> Callable[[Path], bool]:
    chosen = {name: getattr(given, name) for name in ("device", "size", "steps", "rounds", "contenders", "lowering")}
    arguments = [f"--{name}={value}" for name, value in {"model": model, "dtype": dtype, **chosen}.items() if value]
    parsed = bench_train.parser(PROG).parse_args(arguments)

    def run(folder: Path) -> bool:
        comparison = bench_train.run(parsed, _say)
        name = f"train-{model}-{dtype}"
        _write(folder / f"{name}.md", table(comparison, markdown=True))
        _write(folder / f"{name}.svg", bench_train.chart(comparison))
        _write(folder / f"{name}.json", json.dumps(comparison.as_dict(), indent=2))
        return not any(each.failed for each in comparison.contenders)

    return run


def _kernels(dtype: str, given: argparse.Namespace) -> Callable[[Path], bool]:
    small = ["--sizes=10000", "--rounds=5"] if given.size == "tiny" else []
    parsed = bench_kernels.parser(PROG).parse_args([f"--dtype={dtype}", f"--device={given.device}", *small])

    def run(folder: Path) -> bool:
        document = bench_kernels.run(parsed, _say)
        _write(folder / f"kernels-{dtype}.md", bench_kernels.table(document, markdown=True))
        _write(folder / f"kernels-{dtype}.json", json.dumps(document, indent=2))
        return True

    return run


def _passes(given: argparse.Namespace) -> Callable[[Path], bool]:
    arguments = ["--sizes=100,1000", "--model-layers=0"] if given.size == "tiny" else []

    def run(folder: Path) -> bool:
        path = folder / "passes.json"
        with path.with_suffix(".part").open("w") as file, redirect_stdout(file):
            status = bench_passes.main(["--json", *arguments])
        if status == 0:
            path.with_suffix(".part").replace(path)
        return status == 0

    return run


def _write(path: Path, text: str) -> None:
    path.write_text(text.rstrip("\n") + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
