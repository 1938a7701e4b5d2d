"""The table of all kinds of statements."""

from collections.abc import Callable

from programs.draft import Draft

Kind = Callable[[Draft], None]

#: Every kind by name.
STATEMENTS: dict[str, Kind] = {}

#: How often each is drawn.
WEIGHTS: dict[str, int] = {}


def statement(weight: int = 1) -> Callable[[Kind], Kind]:
    """Enter a kind under its function's name; it is drawn ``weight`` times as often as one of weight 1."""

    def enter(kind: Kind) -> Kind:
        STATEMENTS[kind.__name__] = kind
        WEIGHTS[kind.__name__] = weight
        return kind

    return enter
