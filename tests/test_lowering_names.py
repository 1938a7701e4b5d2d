"""The lowerings and modes are those that the backend and Inductor have."""

from fxamp.backend.lowering import _LOWERINGS
from fxamp.lowering_names import LOWERINGS, inductor_modes, mode_settings


def test_every_lowering_is_one_that_the_backend_has() -> None:
    assert tuple(_LOWERINGS) == LOWERINGS


def test_the_modes_are_inductors_own() -> None:
    from torch._inductor import config

    assert {"default", "max-autotune"} <= set(inductor_modes())
    for mode in inductor_modes():
        assert mode_settings(mode).keys() <= config.get_config_copy().keys()
    assert mode_settings(None) == {}
