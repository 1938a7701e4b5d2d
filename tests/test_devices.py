"""Every device type that policies are for exists in torch."""

import torch

from fxamp.devices import DEVICES, NO_FLOAT64
from fxamp.torch_dtypes import widest_float


def test_torch_has_autocast_for_every_device() -> None:
    for device in DEVICES:
        assert torch.get_autocast_dtype(device).is_floating_point


def test_the_widest_float_is_float64_where_there_is_one() -> None:
    assert {device: widest_float(torch.device(device)) for device in DEVICES} == {
        device: torch.float32 if device in NO_FLOAT64 else torch.float64 for device in DEVICES
    }
