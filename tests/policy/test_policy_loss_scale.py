"""``[loss_scale]``: read, compared, handed to a scaler, and missed where there is none."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import fxamp
from fxamp.errors import PolicyError
from fxamp.policy import LossScale, Policy

TEXT = """
extends = ["cpu-float16"]
[loss_scale]
init_scale = 1024
growth_factor = 3.0
backoff_factor = 0.25
growth_interval = 7
min_scale = 2.0
max_scale = 4096.0
"""
SETTINGS = LossScale(1024, 3.0, 0.25, 7, 2.0, 4096.0)


def of(scaler: fxamp.GradScaler) -> LossScale:
    """The settings that a scaler has."""
    bounds = scaler._bounds
    rule = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    return LossScale(scaler.get_scale(), *rule, bounds.min_scale, bounds.max_scale, scaler.is_enabled())


def test_the_table_is_read_and_reaches_a_scaler(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    assert Policy.load(path).loss_scale == SETTINGS
    for source in (Policy.load(path), path, str(path)):
        scaler = fxamp.GradScaler.from_policy(source)
        assert of(scaler) == SETTINGS and isinstance(scaler, fxamp.GradScaler)
    assert of(fxamp.GradScaler.from_policy(path, "cpu", growth_interval=9, min_scale=None)) == dataclasses.replace(
        SETTINGS, growth_interval=9, min_scale=None
    )


def test_the_defaults_are_the_scalers() -> None:
    assert LossScale() == of(fxamp.GradScaler("cpu"))
    assert Policy.loads('extends = ["cpu-bfloat16"]\n[loss_scale]\n').loss_scale == LossScale()


def test_without_the_table_float16_alone_is_scaled() -> None:
    assert fxamp.GradScaler.from_policy("cpu-float16").is_enabled()
    assert not fxamp.GradScaler.from_policy("cpu-bfloat16").is_enabled()
    assert not fxamp.GradScaler.from_policy(Policy.loads(TEXT + "enabled = false")).is_enabled()


def test_later_files_win_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TEXT)
    (tmp_path / "b.toml").write_text('extends = ["a.toml"]\n[loss_scale]\nenabled = false\ninit_scale = 2048\n')
    assert Policy.load(tmp_path / "b.toml").loss_scale == dataclasses.replace(SETTINGS, enabled=False, init_scale=2048)


@pytest.mark.parametrize("changed", [{"init_scale": 512.0}, {"enabled": False}, {"max_scale": None}, None])
def test_the_settings_count_in_equality(changed: dict[str, Any] | None) -> None:
    mine = Policy.loads(TEXT)
    scale = None if changed is None else dataclasses.replace(SETTINGS, **changed)
    other = dataclasses.replace(mine, loss_scale=scale)
    assert other != mine and other.digest != mine.digest


def test_whole_numbers_are_floats() -> None:
    whole, floats = (Policy.loads(f'extends = ["cpu-float16"]\n[loss_scale]\ninit_scale = {n}\n') for n in ("8", "8.0"))
    assert whole == floats and whole.digest == floats.digest and hash(whole) == hash(floats)


def test_bounds_are_checked_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TEXT)
    (tmp_path / "b.toml").write_text('extends = ["a.toml"]\n[loss_scale]\n\nmax_scale = 512.0\n')
    with pytest.raises(PolicyError, match=r"a.toml:4: init_scale = 1024 is out of bounds; accepted: .* 2.0 to 512.0"):
        Policy.load(tmp_path / "b.toml")
    with pytest.raises(PolicyError, match=r"loss_scale: min_scale = 8.0 is above max_scale = 4.0"):
        LossScale(min_scale=8.0, max_scale=4.0)


@pytest.mark.parametrize(
    ("text", "scaler", "trains", "warned"),
    [
        (TEXT, False, True, True),
        (TEXT, False, False, False),
        (TEXT, True, True, False),
        (TEXT + "enabled = false", False, True, False),
        ('extends = ["cpu-float16"]', False, True, True),
        ('extends = ["cpu-bfloat16"]', False, True, False),
    ],
)
def test_a_training_graph_without_a_scaler_is_warned_of_once(
    text: str, scaler: bool, trains: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Policy.loads(text)
    options: dict[str, Any] = {"policy": mine, "lowering": "eager"}
    if scaler:
        options["scaler"] = fxamp.GradScaler.from_policy(mine)
    with caplog.at_level(logging.WARNING, logger="fxamp"):
        for _ in range(2):
            torch._dynamo.reset()
            torch.compile(lambda x: x * 2, backend="fxamp", options=options)(torch.ones(2, requires_grad=trains))
    assert [record.name for record in caplog.records] == ["fxamp.scaler.graphs.unscaled"] * warned
