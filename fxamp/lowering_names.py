"""The lowerings, ways to run a graph, by their names in options."""

from typing import Any

STEP_LOWERINGS = ("inductor", "aot_eager")
"""The lowerings of an optimizer's compiled step: Inductor, or the rewritten graph op by op."""

LOWERINGS = (*STEP_LOWERINGS, "eager")
"""The backend's lowerings: Inductor, AOTAutograd alone, or neither."""


def inductor_modes() -> tuple[str, ...]:
    """Return the modes of the installed torch's Inductor; imports Inductor."""
    from torch._inductor import list_mode_options

    return tuple(list_mode_options())


def mode_settings(mode: str | None) -> dict[str, Any]:
    """Return the Inductor settings of ``mode``; empty for None. Imports Inductor."""
    if mode is None:
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options()[mode])
