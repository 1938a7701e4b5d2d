"""Results that a compiled graph need not make: the values of ``drop``, and the keys that go with it."""

from collections.abc import Iterator

RESULTS = "results"
"""The region of rules on what a graph returns beside a loss."""


def result_problems(rule: dict[str, object]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield ``(key, message)`` for keys of a rule that do not fit together; ``rule`` has the keys that are set."""
    region = rule.get("region", RESULTS)
    if "drop" not in rule:
        return
    if rule["drop"] is not True:
        yield ("drop",), "drop = false asks for nothing; accepted: true, or enabled = false"
    if region not in (RESULTS, "forward"):
        yield ("region",), f"region = {region!r} does not go with drop; accepted: '{RESULTS}', or no region"
    for key in ("cast", "recipe", "inputs", "advice", "reduces", "read_by", "keep", "block", "chunks", "gradients"):
        if key in rule:
            yield (key,), f"{key} does not go with drop: a result that does not exist has no dtype"
