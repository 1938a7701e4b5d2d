"""What the tools' HTML pages share: their colours, and text that is no markup."""

import html
from pathlib import Path

_COLOURS = Path(__file__).with_name("colours.css")

#: The dtypes that have a colour of their own in ``colours.css``; a longer name has that of its beginning.
_DTYPES = ("f32", "f16", "bf16", "f64", "f8", "fp8", "mxfp8", "nvfp4")


def colours() -> str:
    """Return the style sheet that defines the colours, for light and dark screens."""
    return _COLOURS.read_text(encoding="utf-8")


def colour(dtype: str) -> str:
    """Return the CSS colour of a dtype by its short name (``"bf16"``); one colour for all that have none."""
    known = next((name for name in _DTYPES if dtype.startswith(name)), "other")
    return f"var(--{known})"


def escaped(text: str) -> str:
    """Return ``text`` for use in HTML, between tags or in a quoted attribute."""
    return html.escape(text)
