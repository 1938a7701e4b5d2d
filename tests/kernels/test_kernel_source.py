"""The generated sources: their text, what they leave out, and the files that hold them."""

import ast
import itertools

import pytest
import torch
from support.checks.golden_text import FOLDER, assert_golden

from fxamp.kernels.gradient_request import ScaleRule
from fxamp.kernels.gradient_triton import kernel_name, parameters, source_text
from fxamp.kernels.launch_plan import DTYPES, Access, Kernel, Requested
from fxamp.kernels.loss_scale_update_triton import update_text

ALL = Requested(found_inf=True, flags=True, squared_norm=True)
FLAGS = Requested(flags=True)
KERNELS = {
    "unscale_f16_to_f32_flags": Kernel(torch.float16, torch.float32, Access.WIDE, FLAGS, 2048),
    "unscale_f32_in_place_all": Kernel(torch.float32, torch.float32, Access.WIDE, ALL, 2048),
    "unscale_bf16_apart": Kernel(torch.bfloat16, torch.bfloat16, Access.NARROW, Requested(found_inf=True), 2048),
    "unscale_bf16_in_place_unaligned": Kernel(torch.bfloat16, torch.bfloat16, Access.PEELED, ALL, 2048),
    "unscale_f64_to_bf16": Kernel(torch.float64, torch.bfloat16, Access.WIDE, FLAGS, 1024),
    "check_f32_hip": Kernel(torch.float32, None, Access.WIDE, Requested(found_inf=True, flags=True), 4096),
}


@pytest.mark.parametrize("name", KERNELS)
def test_text_is_golden(name: str) -> None:
    assert_golden(f"kernels/{name}", source_text(KERNELS[name]))


def test_update_text_is_golden() -> None:
    assert_golden("kernels/update_scale", update_text(ScaleRule(2.0, 0.5, 2000)))
    assert_golden("kernels/update_scale_bounded", update_text(ScaleRule(1.1, 0.5, 7, min_scale=1, max_scale=2.0**24)))


def test_no_golden_text_is_left_over() -> None:
    assert {path.stem for path in (FOLDER / "kernels").iterdir()} == {*KERNELS, "update_scale", "update_scale_bounded"}


def every_kernel() -> list[Kernel]:
    requested = [Requested(*choice) for choice in itertools.product((False, True), repeat=3)]
    return [
        Kernel(source, target, access, results, 2048)
        for source, target, access, results in itertools.product(DTYPES, (*DTYPES, None), Access, requested)
        if (target is not None or results != Requested()) and (access is not Access.PEELED or target in (None, source))
    ]


def test_every_kernel_is_a_function_that_uses_all_it_takes() -> None:
    for kernel in every_kernel():
        function = ast.parse(source_text(kernel)).body[-1]
        assert isinstance(function, ast.FunctionDef)
        assert function.name == kernel_name(kernel)
        assert [argument.arg for argument in function.args.args] == list(parameters(kernel))
        stored = {
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        loaded = {
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        assert stored | set(parameters(kernel)) <= loaded, (kernel, stored - loaded)


def test_different_kernels_have_different_texts() -> None:
    kernels = every_kernel()
    assert len({source_text(kernel) for kernel in kernels}) == len(kernels)
