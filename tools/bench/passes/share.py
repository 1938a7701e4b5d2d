"""fxamp's share of a whole torch.compile: a GPT-2 with random weights, compiled by Inductor with empty caches."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fxamp.backend import registry
from fxamp.backend.compile import fxamp
from fxamp.errors import OptionError
from fxamp.observe import CompileStage, Event, observing


@dataclass(frozen=True)
class Share:
    """Elapsed seconds of the first forward and backward of a compiled model minus those of the second.

    ``own`` is fxamp's part: ``capture``, ``passes`` (with their record) and the choice of the policy. ``lowering`` is
    Inductor's part of the backend call; it compiles the backward later.
    """

    layers: int
    graphs: int
    ops: int
    casts: int
    total: float
    own: float
    capture: float
    passes: float
    lowering: float

    @property
    def own_share(self) -> float:
        """fxamp's share of the whole, 0 to 1."""
        return self.own / self.total


class Stopwatch:
    """Elapsed seconds by name; what is timed twice under one name adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time what runs inside under ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def stage(self, event: Event) -> AbstractContextManager[None]:
        """Time the stages of the backend under their names; an observer."""
        return self.timed(event.name) if isinstance(event, CompileStage) else nullcontext()


def time_compile(layers: int, lowering: str = "inductor", policy: str = "cpu-bfloat16") -> Share:
    """Compile a GPT-2 of ``layers`` layers, 48 wide (only the number of ops counts), and run forward and backward.

    Raises OptionError if transformers is not installed.
    """
    model, call = _gpt2(layers)
    watch, since = Stopwatch(), registry.count()

    def backend(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        with watch.timed("backend"):
            return fxamp(*args, **kwargs)

    with observing(watch.stage), _without_caches():
        compiled = torch.compile(model, backend=backend, options={"policy": policy, "lowering": lowering})
        for step in ("first step", "second step"):
            with watch.timed(step):
                compiled(**call).loss.backward()
    records = registry.recent(since)
    seconds = watch.seconds
    return Share(
        layers=layers,
        graphs=len(records),
        ops=sum(record.ops for record in records),
        casts=sum(record.casts for record in records),
        total=seconds["first step"] - seconds["second step"],
        own=seconds["backend"] - seconds["lowering"],
        capture=seconds["capture"],
        passes=seconds["passes"],
        lowering=seconds["lowering"],
    )


def _gpt2(layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise OptionError("--model-layers needs transformers: pip install transformers, or --model-layers 0") from error
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=48,
        n_head=4,
        vocab_size=256,
        n_positions=64,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(256, (1, 32))
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


@contextmanager
def _without_caches() -> Iterator[None]:
    """Inside, Inductor's and AOTAutograd's caches are empty."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield
