"""fxamp-bench step: how long an optimizer's step takes to compile and to run, compared with torch's own."""

import argparse
from collections.abc import Callable

from fxamp.tools.bench.report import Report, add_styles, require_device, some_of
from fxamp.tools.bench.train.experiment import FUSED, OPTIMIZERS, PARAMETERS, STEPPERS, Experiment
from fxamp.tools.bench.train.table import reported
from fxamp.tools.common.command_line import Parser, one_of, positive


def parser(prog: str) -> Parser:
    """The options of this command."""
    from fxamp.lowering_names import STEP_LOWERINGS

    result = Parser(prog, "Step the parameters of GPT-2 with one optimizer in several ways, in turn, and compare them.")
    add = result.add_argument
    add("--optimizer", type=one_of(*OPTIMIZERS), default="AdamW", help=f"{', '.join(OPTIMIZERS)} (default AdamW)")
    add("--parameters", type=positive, default=148, help="how many tensors (default 148, as GPT-2 with 12 layers)")
    add(
        "--width",
        type=positive,
        default=64,
        help="width of GPT-2 (default 64); with 768 the 148 tensors have 124 M elements",
    )
    add("--contenders", type=some_of(*STEPPERS), metavar="NAMES", help=f"some of {','.join(STEPPERS)} (default all)")
    add(
        "--policy",
        action="append",
        default=[],
        metavar="P",
        help="add fxamp with weights and state as this policy's [optimizer] table says; may be repeated",
    )
    add("--steps", type=positive, default=5, help="measured steps of a contender in a round (default 5)")
    add("--rounds", type=positive, default=5, help="rounds of a start (default 5)")
    add("--starts", type=positive, default=2, help="processes of each contender, one after the other (default 2)")
    add("--device", type=one_of("cpu", "cuda"), default="cpu", help="cpu (default) or cuda")
    add("--threads", type=positive, default=1, help="CPU threads; 1 gives steady times (default 1)")
    add(
        "--lowering",
        type=one_of(*STEP_LOWERINGS),
        default="inductor",
        help="lowering of compiled steps (default inductor)",
    )
    add_styles(result)
    return result


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Measure; ``say`` receives lines of progress. Raises FxampError for a user's mistake."""
    from fxamp.tools.bench.train.measure import compare

    require_device(options.device)
    policies = tuple(dict.fromkeys(options.policy))
    for name in policies:
        _require_table(name)
    fields = ("device", "steps", "rounds", "starts", "threads", "lowering", "optimizer")
    sizes = {"tensors": options.parameters, "width": options.width}
    settings = {name: getattr(options, name) for name in fields}
    experiment = Experiment(PARAMETERS, "", policies=policies, changed=sizes, **settings)
    names = options.contenders or [name for name in STEPPERS if name != "fused" or options.optimizer in FUSED]
    return reported(compare(experiment, [*names, *policies], names[0], say))


def _require_table(policy: str) -> None:
    from fxamp.errors import OptionError
    from fxamp.tools.common.policy_step import optimizer_precision

    if optimizer_precision(policy) is None:
        raise OptionError(
            f"--policy {policy}: its [optimizer] table changes nothing, so its step is that of the contender fxamp; "
            "accepted: a policy with such a table, such as cpu-bfloat16-lean"
        )
