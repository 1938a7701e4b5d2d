"""Gradients of every kind: sparse, missing, of several dtypes, sharded; and outputs of every kind."""

from collections import namedtuple

import pytest
import torch
from support.oracles.side_by_side import SCALERS, assert_same
from torch import Tensor, nn

from fxamp.optim.gradients import Gradients
from fxamp.scaler import GradScaler

Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize("bad", [False, True])
def test_sparse_gradients(bad: bool) -> None:
    results = []
    for kind in SCALERS:
        torch.manual_seed(0)
        embedding = nn.Embedding(6, 3, sparse=True)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        scaler = kind("cpu")
        output = embedding(torch.tensor([1, 1, 4])).sum() * (float("inf") if bad else 1.0)
        scaler.scale(output).backward()
        scaler.unscale_(optimizer)
        assert embedding.weight.grad is not None and embedding.weight.grad.is_sparse
        gradient = embedding.weight.grad._values().clone()
        scaler.step(optimizer)
        scaler.update()
        results.append((gradient, embedding.weight, scaler.state_dict()))
    assert_same(results[1], results[0])


def test_a_half_sparse_gradient_is_coalesced_before_the_check() -> None:
    """40000 + 40000 at one index overflows float16, though neither value does."""
    for kind in SCALERS:
        parameter = torch.zeros(4, 1, dtype=torch.float16, requires_grad=True)
        values = torch.full((2, 1), 40000.0, dtype=torch.float16)
        with torch.sparse.check_sparse_tensor_invariants():
            parameter.grad = torch.sparse_coo_tensor(torch.tensor([[2, 2]]), values, (4, 1))
        scaler = kind("cpu")
        scaler.scale(torch.ones(()))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [1.0]
        assert parameter.grad.is_coalesced()


@pytest.mark.parametrize("bad", [torch.float32, torch.float64, torch.bfloat16, None])
def test_several_dtypes_in_one_optimizer(bad: torch.dtype | None) -> None:
    results = []
    for kind in SCALERS:
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
        parameters = [torch.ones(3, dtype=dtype, requires_grad=True) for dtype in dtypes]
        unused = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([*parameters, unused], lr=0.1)
        scaler = kind("cpu", init_scale=2.0**10)
        scaler.scale(torch.stack([p.square().sum().float() for p in parameters]).sum()).backward()
        for parameter in parameters:
            if parameter.dtype == bad:
                assert parameter.grad is not None
                parameter.grad[1] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        assert unused.grad is None
        results.append(([p.grad for p in parameters], parameters, scaler.state_dict()))
    assert_same(results[1], results[0])


def test_outputs_keep_their_form() -> None:
    one = torch.ones(2)
    for kind in SCALERS:
        scaler = kind("cpu", init_scale=4.0)
        nested = scaler.scale([one, (one, [one])])
        assert type(nested) is list and type(nested[1]) is tuple and type(nested[1][1]) is list
        assert_same(nested, [one * 4, (one * 4, [one * 4])])
        assert_same(list(scaler.scale(t for t in (one, one))), [one * 4, one * 4])
        assert_same(scaler.scale(torch.ones((), dtype=torch.float16)), torch.tensor(4.0))
        assert_same(scaler.scale(one.half()), one.half() * 4)


def test_named_tuples_are_tuples_too() -> None:
    """torch calls their type with one iterable, and fails."""
    scaled = GradScaler("cpu", init_scale=4.0).scale(Pair(torch.ones(()), torch.ones(())))
    assert type(scaled) is Pair
    assert scaled.first == scaled.second == 4.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.usefixtures("one_rank")
def test_a_sharded_gradient_is_unscaled_where_it_lies(bad: bool) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = GradScaler("cpu")
    loss: Tensor = weight.square().sum().to_local() * (float("inf") if bad else 1.0)
    scaler.scale(loss).backward()
    # A kernel takes addresses, and a DTensor has none of its own.
    assert type(Gradients([weight]).groups()[0].gradients[0]) is Tensor
    result = scaler.step(optimizer, return_skipped=True)
    assert result.skipped is bad
    assert_same(weight.detach().to_local(), torch.ones(4, 2) if bad else torch.zeros(4, 2))
