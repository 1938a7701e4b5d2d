"""The plan: which gradients share a launch, how they are cut, what they cost."""

import torch

from fxamp.kernels.launch_plan import CHUNK, Access, Gradient, Requested, is_dense, make_plan

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FLAGS, WIDE = Requested(flags=True), Access.WIDE


def test_gradients_of_one_dtype_pair_and_access_share_a_launch() -> None:
    gradients = (
        Gradient(10, F16, F32, WIDE, True),
        Gradient(10, F32, F32, WIDE, True),
        Gradient(20, F16, F32, WIDE, True),
        Gradient(30, F16, F16, WIDE, True),
        Gradient(40, F16, F32, Access.NARROW, True),
        Gradient(50, F16, F16, Access.PEELED, True),
    )
    plan = make_plan(gradients, FLAGS, 32)
    assert [group.positions for group in plan.groups] == [(0, 2), (1,), (3,), (4,), (5,)]
    assert [group.numels for group in plan.groups] == [(10, 20), (10,), (30,), (40,), (50,)]
    assert [group.kernel.access for group in plan.groups] == [WIDE, WIDE, WIDE, Access.NARROW, Access.PEELED]


def test_what_no_kernel_handles_is_left_and_empty_gradients_need_nothing() -> None:
    gradients = (
        Gradient(10, F32, F32, WIDE, False),
        Gradient(10, torch.complex64, torch.complex64, WIDE, True),
        Gradient(10, F32, torch.float8_e5m2, WIDE, True),
        Gradient(0, F32, F32, WIDE, True),
        Gradient(10, F32, None, WIDE, True),
    )
    plan = make_plan(gradients, FLAGS, 32)
    assert plan.left == (0, 1, 2)
    assert [group.positions for group in plan.groups] == [(4,)]


def test_block_fits_the_chunk_and_the_wave() -> None:
    blocks = {
        (dtype, wave): make_plan((Gradient(1, dtype, F32, WIDE, True),), FLAGS, wave).groups[0].kernel.block
        for dtype in (F16, F32, torch.float64)
        for wave in (32, 64)
    }
    assert list(blocks.values()) == [2048, 4096, 2048, 4096, 1024, 2048]
    assert all(CHUNK % block == 0 for block in blocks.values())


def test_tables_are_on_the_cpu_whatever_the_default_device() -> None:
    (group,) = make_plan((Gradient(5, F32, F32, WIDE, True),), FLAGS, 32).groups
    with torch.device("meta"):
        assert group.blocks.device.type == "cpu"


def test_dense_means_no_gaps_and_no_overlaps() -> None:
    storage = torch.zeros(4, 6, 5)
    dense = [storage, storage.t() if storage.dim() == 2 else storage.permute(2, 0, 1), storage[1:3], storage[0, 0, 0]]
    dense += [torch.zeros(1, 3)[:, :1], torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), storage[:0]]
    dense.append(torch.empty_strided((2, 1, 3), (1, 7, 2)))
    gaps = [
        storage[:, ::2],
        storage[..., 0],
        storage[:, :, 1:],
        torch.zeros(1).expand(3),
        torch.zeros(3, 1).expand(3, 4),
    ]
    assert all(map(is_dense, dense))
    assert not any(map(is_dense, gaps))
