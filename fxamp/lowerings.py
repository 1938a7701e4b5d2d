"""How a graph can be made to run, by the names that options have for it."""

from typing import Any

STEP_LOWERINGS = ("inductor", "aot_eager")
"""The lowerings of an optimizer's compiled step: Inductor, or the rewritten graph op by op."""

LOWERINGS = (*STEP_LOWERINGS, "eager")
"""The backend's lowerings: Inductor, AOTAutograd alone, or neither."""


def inductor_modes() -> tuple[str, ...]:
    """The modes that the installed torch's Inductor has; imports Inductor."""
    from torch._inductor import list_mode_options

    return tuple(list_mode_options())


def mode_settings(mode: str | None) -> dict[str, Any]:
    """The Inductor settings that ``mode`` stands for; none for None. Imports Inductor."""
    if mode is None:
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options()[mode])
