"""Losses in chunks of rows: the values of ``chunks`` and ``gradients``, and the keys that go with them."""

from collections.abc import Iterator

LOSS = "loss"
"""The region of rules on losses that a linear layer's results go into."""

AUTO = "auto"
"""Twice the hidden size, rounded up to a power of two: a chunk's logits are two to four times the layer's weight, and
the weight's gradient, which each chunk reads and writes, costs less time than the products."""

Chunks = int | str
"""The rows of a chunk, or "auto"."""

GRADIENTS = ("forward", "backward")
"""Who makes a chunk's gradients. The forward keeps them; the backward computes the logits again."""


def chunks_of(value: object) -> Chunks:
    """Return the value of ``chunks``. Raises ValueError if it is not accepted."""
    if value == AUTO or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"chunks = {value!r} is not accepted; accepted: 'auto', or a whole number of rows from 1 on")


def chunk_problems(rule: dict[str, object]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield ``(key, message)`` for keys of a rule that do not fit together; ``rule`` has the keys that are set."""
    if "chunks" not in rule:
        if "gradients" in rule:
            yield ("gradients",), "gradients goes with chunks, which this rule does not have"
        return
    region = rule.get("region", LOSS)
    if region not in (LOSS, "forward"):
        yield ("region",), f"region = {region!r} does not go with chunks; accepted: '{LOSS}', or no region"
    for key in ("cast", "recipe", "inputs", "advice", "reduces", "read_by", "keep", "block"):
        if key in rule:
            yield (key,), f"{key} does not go with chunks: what a loss computes in is decided by the other rules"
