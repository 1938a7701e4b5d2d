"""Inductor's table of ops is as fxamp takes it to be."""

import torch

from fxamp import torch_private as private

aten = torch.ops.aten


def test_whose_kernels_inductor_calls() -> None:
    called = (aten._scaled_dot_product_flash_attention_backward.default, aten._cdist_backward.default)
    assert all(map(private.calls_kernel, called))
    written = (aten.add.Tensor, aten.mm.default, aten.view.default, torch.add)
    assert not any(map(private.calls_kernel, written))
