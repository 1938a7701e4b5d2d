"""What part of a whole torch.compile is fxamp's: a GPT-2 with random weights, compiled by Inductor without caches."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from fxamp.backend import compile as backend
from fxamp.backend import registry
from fxamp.errors import OptionError


@dataclass(frozen=True)
class Share:
    """Elapsed seconds of the first forward and backward of a compiled model, less those of the second.

    ``own`` is all that fxamp does: ``capture``, ``passes`` (counting what they did included) and the choice of the
    policy. ``lowering`` is what Inductor does while the backend is called; it compiles the backward later.
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
        """fxamp's part of the whole, 0 to 1."""
        return self.own / self.total


class Stopwatch:
    """Elapsed seconds by name; a function wrapped with :meth:`timed` adds to its name's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed under ``name``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        return run


def time_compile(layers: int, lowering: str = "inductor", policy: str = "cpu-bfloat16") -> Share:
    """Compile a GPT-2 of ``layers`` layers, 48 wide (only the number of ops counts), and run forward and backward.

    Raises OptionError if transformers is not installed.
    """
    model, call = _gpt2(layers)
    watch, since = Stopwatch(), registry.count()
    with _watched(watch), _without_caches():
        compiled = torch.compile(
            model, backend=watch.timed("backend", backend.fxamp), options={"policy": policy, "lowering": lowering}
        )
        step = watch.timed("step", lambda: compiled(**call).loss.backward())
        step()
        first = watch.seconds.pop("step")
        step()
    records = registry.recent(since)
    seconds = watch.seconds
    return Share(
        layers=layers,
        graphs=len(records),
        ops=sum(record.ops for record in records),
        casts=sum(record.casts for record in records),
        total=first - seconds["step"],
        own=seconds["backend"] - seconds["lower_graph"],
        capture=seconds["capture"],
        passes=seconds["apply_policy"],
        lowering=seconds["lower_graph"],
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
def _watched(watch: Stopwatch) -> Iterator[None]:
    """The stages of the backend are timed inside."""
    stages = ("capture", "apply_policy", "lower_graph")
    with ExitStack() as stack:
        for name in stages:
            stack.enter_context(patch.object(backend, name, watch.timed(name, getattr(backend, name))))
        yield


@contextmanager
def _without_caches() -> Iterator[None]:
    """Inductor's and AOTAutograd's caches are empty inside, as on a machine that never compiled anything."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield
