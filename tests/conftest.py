"""What every test may count on: no state of its neighbours, any order, the CPU that was asked for, one thread of it."""

import atexit
import gc
import itertools
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import simulated_cpu

#: The examples are the same in every run, and no example is too slow. ``--hypothesis-profile=explore`` draws others.
hypothesis.settings.register_profile("same", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("explore", derandomize=False, database=None, deadline=None)
hypothesis.settings.load_profile("same")

#: After this many tests, a process collects all garbage. Dynamo leaves cycles behind, a class in each.
COLLECTED_AFTER = 50
_finished = itertools.count(1)

#: With more processes than this, those that have nothing left to do wait for the longest test.
MOST_PROCESSES = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", choices=list(simulated_cpu.CPUS), help="simulate a CPU with bfloat16 units, or without")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the processes for ``-n auto``: one for each processor if a folder is tested, else pytest's own alone."""
    folders = [argument for argument in config.args if Path(argument.partition("::")[0]).is_dir()]
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(processors, MOST_PROCESSES) if folders and processors > 1 else 0


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests. The one that only hands tests out to others imports no torch."""
    if not config.getoption("numprocesses", 0) or hasattr(config, "workerinput"):
        _prepare(config)


def _prepare(config: pytest.Config) -> None:
    """Simulate the CPU here, and in the processes that tests start; all compute on one thread, as tensors are tiny.

    Five things that cost much of a run and decide nothing are left out. Inductor's pool of compiling processes imports
    torch once more. Vector instructions double the time of the C++ compiler; the exhaustive tests compile with them.
    Dynamo's measurement of its guards flushes the processor's cache, which takes longer than compiling a small graph.
    Since torch 2.14 a reset of Dynamo empties the cache of fake tensors' results.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch
    import torch._dynamo.guards
    import torch._inductor.config
    from support.programs import torchvision_ops
    from torch._subclasses import FakeTensorMode

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    if config.getoption("markexpr") != "exhaustive":
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
        torch._inductor.config.cpp.vec_isa_ok = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    FakeTensorMode.cache_clear = lambda: None
    # torch sets its loggers up on the first compile. It traces each compilation for whoever listens to this one, and
    # pytest listens to all that do not propagate.
    torch._logging._internal._init_logs()
    torch._logging._internal.trace_log.propagate = True
    if config.getoption("cpu"):
        folder = str(Path(simulated_cpu.__file__).parent)
        os.environ[simulated_cpu.VARIABLE] = config.getoption("cpu")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    simulated_cpu.simulate()
    torchvision_ops.define_missing_ops()


@pytest.hookimpl(tryfirst=True)  # pytest then brings together the tests that share a fixture of the session
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from support.machines.lacks import needs_compiler

    for item in items:
        if item.get_closest_marker("inductor") or "counting" in getattr(item, "fixturenames", ()):
            item.add_marker(needs_compiler)
    if config.getoption("shuffle") is not None:
        random.Random(config.getoption("shuffle")).shuffle(items)


def pytest_collection_finish() -> None:
    """Undo what imports leave behind that costs much of a run.

    Lightning makes torch ask the driver's NVML for GPUs, which fake tensors do before each op: without a driver, 40 us
    to find no library. What was imported stays for the whole session: garbage collections leave it out. As it ends, the
    interpreter collects everything: extension modules complain otherwise.
    """
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.set_threshold(*gc.get_threshold()[:2], 1_000_000)


def pytest_runtest_logfinish() -> None:
    """Collect all garbage after a number of tests; what is alive between tests stays out of later collections.

    Torch collects garbage after each compilation, so that Python looks at all objects once in a few dozen compilations,
    half a second each time. The threshold above keeps it from that.
    """
    if next(_finished) % COLLECTED_AFTER == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def no_logging() -> Iterator[None]:
    """Fake kernels log what they refuse, and torch's tracing would write a record of every graph."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> None:
    """Nothing is compiled, dumped or said yet, and random numbers start again."""
    import torch

    from fxamp.reports import dumps
    from fxamp.reports.warnings import warn_once

    torch._dynamo.reset()
    torch.manual_seed(0)
    warn_once.cache_clear()
    dumps._numbers.clear()
