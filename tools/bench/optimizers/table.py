"""The result as a table, for a terminal or as Markdown, with reasons and explanations in notes below."""

from collections.abc import Callable

from tabulate import tabulate

from fxamp.tools.bench.optimizers.agreement import DIFFERS, EQUAL, ROUNDING
from fxamp.tools.bench.optimizers.result import NOT_IN_TORCH, Moved, Pair, Result, Row
from fxamp.tools.bench.optimizers.scenario import SCENARIOS

MISSING = "-"
#: Stands between torch's number and fxamp's.
ARROW = " -> "
#: A note shows so many characters of a reason; JSON has all of it.
LONGEST = 200


def table(result: Result, markdown: bool = False) -> str:
    """Return title, table and notes. ``-`` marks what torch itself cannot do, and numbers without meaning."""
    headers = ("optimizer", "decided by", *SCENARIOS, "host syncs", "bytes/parameter", "with clipping")
    rows = [_cells(row) for row in result.rows]
    drawn = tabulate(rows, headers, tablefmt="github" if markdown else "simple", disable_numparse=True)
    notes = "\n".join(f"- {note}" if markdown else note for note in _notes(result))
    return "\n\n".join([_title(result), drawn, notes])


def bytes_text(bytes_: float | None) -> str:
    """Return bytes per parameter as text: ``"32"``, ``"6.5"``."""
    return MISSING if bytes_ is None else f"{bytes_:.1f}".removesuffix(".0")


def _cells(row: Row) -> tuple[str, ...]:
    words = [row.scenarios[name].word for name in SCENARIOS]
    return (
        row.label,
        row.decided_by,
        *(MISSING if word == NOT_IN_TORCH else word for word in words),
        _both(row.step, lambda moved: str(moved.host_syncs)),
        _both(row.step, lambda moved: bytes_text(moved.bytes)),
        _both(row.clipped, lambda moved: bytes_text(moved.bytes)),
    )


def _both(pair: Pair, show: Callable[[Moved], str]) -> str:
    """Return torch's number and fxamp's, one ``-`` if there is neither."""
    texts = [MISSING if moved is None else show(moved) for moved in (pair.torch, pair.fxamp)]
    return MISSING if set(texts) == {MISSING} else ARROW.join(texts)


def _title(result: Result) -> str:
    facts = dict(result.machine)
    versions = ", ".join(f"{name} {version}" for name, version in facts.items() if name != "device")
    return (
        f'torch.amp.GradScaler and the eager optimizer -> fxamp.GradScaler(skip="device"), lowered by '
        f"{result.lowering}, on {facts['device']}; {versions}"
    )


def _notes(result: Result) -> list[str]:
    waits = "operations that wait for the device" if result.device == "cuda" else "values that the host reads"
    plain, clipped = (bytes_text(moved.bytes) for moved in (result.reference.step, result.reference.clipped))
    return [
        f"{EQUAL}: bit for bit torch's. {ROUNDING}: no further from float64 than four times torch's own distance and "
        f"one rounding more. {DIFFERS}: further. Parameters, saved state and scales are compared.",
        f"Of a steady step; the first, which makes the state, is the host's. Host syncs: {waits}. Bytes: read and "
        f"written by check, unscaling, clipping and step; "
        f"torch's GradScaler with fused AdamW moves {plain}, with clipping {clipped}.",
        *(f"The host decides for {row.name}: {_short(row.reasons[0])}" for row in result.rows if row.reasons),
        *(
            f"{row.name}, {name}, {cell.word}: {_short(cell.why)}"
            for row in result.rows
            for name, cell in row.scenarios.items()
            if cell.why
        ),
    ]


def _short(reason: str) -> str:
    """Return a reason without torch's remarks in brackets, cut to one line."""
    text = reason.partition(" (unhinted:")[0]
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
