"""Losses in chunks of rows: the values of ``chunks`` and ``gradients``."""

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
