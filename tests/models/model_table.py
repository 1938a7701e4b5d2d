"""Print the table of models: ``PYTHONPATH=. python tests/models/model_table.py``.

Its columns: graphs, ATen ops and inserted casts; the loss in float64, under eager autocast, and through fxamp's
rewritten graphs; the error of the whole gradient against float64, relative to its norm, averaged over the draws of
weights; and whether loss and gradients equal eager autocast's bit for bit.
"""

import statistics

import torch
import transformers
from error_rule import relative_errors
from model_runs import Baseline, Compiled, baseline, compiled, same
from tabulate import tabulate
from zoo import MODELS

_HEADERS = (
    "model",
    "graphs",
    "ops",
    "casts",
    "loss float64",
    "autocast",
    "fxamp",
    "gradient error: autocast",
    "fxamp eager",
    "fxamp aot_eager",
    "bitwise",
)


def row(base: Baseline, eager: Compiled, aot_eager: Compiled) -> tuple[object, ...]:
    """One model's line of the table."""
    runs = (base.autocast, eager.runs, aot_eager.runs)
    errors = [statistics.fmean(relative_errors(each, base.true)) for each in runs]
    return (
        base.name,
        len(eager.records),
        sum(record.ops for record in eager.records),
        sum(record.casts for record in eager.records),
        *(f"{run.loss:.5f}" for run in (base.true[0], base.autocast[0], eager.runs[0])),
        *(f"{error:.3%}" for error in errors),
        "yes" if all(map(same, eager.runs, base.autocast)) else "no",
    )


def main() -> None:
    """Run every model and print the table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for name in MODELS:
        base = baseline(name)
        rows.append(row(base, compiled(base, "eager"), compiled(base, "aot_eager")))
    print(tabulate(rows, _HEADERS, disable_numparse=True))


if __name__ == "__main__":
    main()
