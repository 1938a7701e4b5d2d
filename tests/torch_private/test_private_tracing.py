"""torch's tracing mode, compiling flag and autocast switch are as fxamp takes them to be."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checks.equality import assert_equal
from support.oracles.beside_threads import Beside
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx

from fxamp import torch_private as private


def test_make_fxs_mode_takes_another_class() -> None:
    class Mode(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    ops: list[Any] = []

    def traced(x: Tensor) -> Tensor:
        assert isinstance(private.replace_tracing_mode(Mode), Mode)
        return x.sin()

    gm = make_fx(traced, pre_dispatch=True)(torch.ones(2))
    assert ops == [torch.ops.aten.sin.default]
    assert [n.target for n in gm.graph.find_nodes(op="call_function", target=ops[0])] == ops


def test_make_fx_records_what_torchs_does_and_nobody_notices() -> None:
    beside = Beside()

    def traced(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        assert type(private.compile_lock()).__name__ == "RLock"
        beside.run()
        return x.sin() @ y, linear(y)

    linear, inputs = torch.nn.Linear(2, 2), (torch.ones(2, 2), torch.ones(2, 2))
    for options in ({}, {"pre_dispatch": True}):
        ours = private.make_fx(traced, {torch.ops.aten.t.default: lambda x: x.transpose(0, 1)}, **options)(*inputs)
        assert not beside.errors and beside.runs
        theirs = make_fx(
            lambda x, y: (x.sin() @ y, linear(y)), {torch.ops.aten.t.default: lambda x: x.transpose(0, 1)}, **options
        )(*inputs)
        assert ours.code == theirs.code
        assert_equal(ours(*inputs), theirs(*inputs))


def test_real_tensors_are_computed_beside_a_fake_mode() -> None:
    with FakeTensorMode():
        with private.without_fake_mode():
            assert torch.ones(2).add(1).tolist() == [2, 2]
        assert isinstance(torch.ones(2), FakeTensor)


def test_the_compiling_flag_is_set_and_given_back() -> None:
    assert not torch.compiler.is_compiling()
    with private.compiling_flag():
        assert torch.compiler.is_compiling()
        with private.compiling_flag():
            assert torch.compiler.is_compiling()
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


@pytest.mark.parametrize("everywhere", [True, False])
def test_another_thread_sees_the_compiling_flag_only_if_it_must(everywhere: bool) -> None:
    flags: list[bool] = []
    with private.compiling_flag(everywhere):
        thread = threading.Thread(target=lambda: flags.append(bool(torch.compiler.is_compiling())))
        thread.start()
        thread.join()
        assert torch.compiler.is_compiling()
    assert flags == [everywhere]


def test_threads_that_overlap_leave_the_compiling_flag_as_it_was() -> None:
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with private.compiling_flag():
            inside.set()
            leave.wait(timeout=60)

    def second() -> None:
        inside.wait(timeout=60)
        with private.compiling_flag():
            done.set()

    done = threading.Event()
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    inside.wait(timeout=60)
    overlapped = done.wait(timeout=0.2)
    leave.set()
    for thread in threads:
        thread.join(timeout=60)
    assert not overlapped and done.is_set()
    assert not torch.compiler.is_compiling()


def test_compiled_functions_run_as_written_in_one_thread() -> None:
    runs: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Tensor) -> Any:
            runs.append(threading.get_ident())
            return gm(*args)

        return run

    compiled = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True, dynamic=False)
    compiled(torch.ones(2))
    del runs[:]
    with private.compiled_as_written():
        assert compiled(torch.ones(2)).tolist() == compiled(torch.ones(3)).tolist()[:2] == [2, 2]
        thread = threading.Thread(target=compiled, args=(torch.ones(2),))
        thread.start()
        thread.join(timeout=60)
    compiled(torch.ones(3))
    assert runs == [thread.ident, threading.get_ident()]


def test_without_autocast_nothing_is_cast() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with private.without_autocast():
            assert (x @ x).dtype is torch.float32
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
        assert (x @ x).dtype is torch.bfloat16
