"""The events of a training: overflows, accumulation, clipping."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """``bad``: steps whose gradients overflow; ``micro``: backwards a step; ``max_norm``: of clipping, or None."""

    bad: tuple[int, ...] = ()
    micro: int = 1
    max_norm: float | None = None
    steps: int = 5


SCENARIOS = {
    "clean": Scenario(),
    "skipped first": Scenario(bad=(0, 1)),
    "skipped later": Scenario(bad=(2,)),
    "accumulation": Scenario(bad=(0, 3), micro=2),
    "clipping": Scenario(bad=(0, 3), max_norm=0.5),
}
