"""The summary of a calibration: one line per op and group of modules whose paths differ only by numbers.

Products in fp8 have a second table, of one line per operand that their recipe scales.
"""

from collections import defaultdict
from collections.abc import Sequence

from tabulate import tabulate

from fxamp.graph_text.model import short_op
from fxamp.tools.policy.calibrate.evidence import Sample, Scaled
from fxamp.tools.policy.calibrate.ranges import Range
from fxamp.tools.policy.calibrate.rules import NUMBER
from fxamp.tools.policy.calibrate.troubles import Limits, share

_FP8_HEADERS = ("module", "op", "operand of fp8", "dtype", "values", "under", "proposed")

_HEADERS = ("module", "op", "values", "largest", "over", "under", "gradient", "over", "under", "proposed")


def summary(samples: Sequence[Sample], limits: Limits) -> str:
    """Return the table of ops that the policy runs in 16 bits; each number is that of the worst value."""
    lines: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        if not sample.raised:
            lines[NUMBER.sub("*", sample.place.module), short_op(sample.place.op)].append(sample)
    rows = [(module or "(root)", op, *_numbers(group, limits)) for (module, op), group in lines.items()]
    return tabulate(rows, headers=_HEADERS, disable_numparse=True)


def fp8_summary(scaled: Sequence[Scaled], limits: Limits) -> str:
    """Return the table of the operands of products in fp8: values, and the share that their scales leave too small."""
    lines: dict[tuple[str, ...], list[Scaled]] = defaultdict(list)
    for operand in scaled:
        module = NUMBER.sub("*", operand.place.module) or "(root)"
        lines[module, short_op(operand.place.op), operand.operand.words, operand.range.format.name].append(operand)
    rows = []
    for key, operands in lines.items():
        under = max(operand.range.underflow() for operand in operands)
        bad = sum(bool(limits.fp8_troubles(operand)) for operand in operands)
        proposed = "" if not bad else "16 bits" if bad == len(operands) else f"16 bits for {bad} of {len(operands)}"
        rows.append(
            (*key, str(sum(operand.range.count for operand in operands)), share(under) if under else "", proposed)
        )
    return tabulate(rows, headers=_FP8_HEADERS, disable_numparse=True)


def _numbers(samples: Sequence[Sample], limits: Limits) -> list[str]:
    bad = {sample.place for sample in samples if limits.troubles(sample)}
    places = {sample.place for sample in samples}
    float32 = f"float32 for {len(bad)} of {len(places)}" if len(bad) < len(places) else "float32"
    forward, gradient = [sample.forward for sample in samples], [sample.gradient for sample in samples]
    return [
        str(sum(values.count for values in forward)),
        *_worst(forward, 0),
        *_worst(gradient, limits.shift),
        float32 if bad else "",
    ]


def _worst(ranges: Sequence[Range], shift: int) -> list[str]:
    if not any(values.nonzero for values in ranges):
        return ["", "", ""]
    over = max(values.overflow(shift) for values in ranges)
    under = max(values.underflow(shift) for values in ranges)
    largest = max(values.amax for values in ranges) * 2.0**shift
    return [f"{largest:.3g}", *(share(part) if part else "" for part in (over, under))]
