"""Lower a graph with Inductor: the compiler for AOTAutograd's graphs, and the contents of torch's caches.

Imports Inductor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch._inductor import config
from torch.fx import GraphModule

from fxamp.backend.participants import Participants
from fxamp.backend.stored_backward import StoredBackward
from fxamp.kernels.products.grouped_product import grouped_kernel
from fxamp.lowering_names import mode_settings
from fxamp.pipeline.cache_key import keyed
from fxamp.pipeline.participant import Boxed, GraphCompiler, Partitioner
from fxamp.policy import Category
from fxamp.policy.model.site import KEPT, LOSS
from fxamp.torch_private import (
    donated_inputs,
    is_cacheable,
    is_dynamic,
    order_writes,
    realize_inputs_of,
    stores_backwards,
    storing_backwards,
)
from fxamp.torch_private.parts.functorch import config as functorch_config
from fxamp.torch_private.parts.functorch import partitioners
from fxamp.torch_private.parts.inductor import CustomPartitionerFn, compile_fx

#: Inductor writes a value of more ops than this to memory; here for a backward with values in 8 bits, and for losses in
#: chunks. Conversions from and to 8 bits have about ten: with Inductor's own limit for GPUs, 30, some kernels recompute
#: a value from all its inputs that the kernel before could have written. The gradient of a chunk's logits has forty: in
#: one piece, it takes the place of the logits.
_OPS_WITH_8_BITS_OR_CHUNKS = 60

#: The same for a scaled backward on a GPU. The scale adds a read and a product to what is computed from the loss's
#: gradient. At Inductor's limit, the gradient of 16-bit logits would be written beside the logits instead of over them.
_OPS_SCALED = 34

#: The same where products have operands of 4 bits, in both directions. Stochastic rounding to 4 bits takes about a
#: hundred ops, and what Inductor would write on the way has eight times the bytes of the result.
_OPS_WITH_4_BITS = 300


def lower_by_inductor(gm: GraphModule, inputs: Sequence[Any], participants: Participants) -> Callable[..., Any]:
    """Compile ``gm`` with Inductor, and return a callable."""
    options = participants.options
    order_writes()
    realize_inputs_of(grouped_kernel)
    patches, key = {**mode_settings(options.mode), **options.inductor}, participants.key(gm)
    min_cut = partitioners.min_cut_rematerialization_partition
    partition = participants.partition(min_cut, inputs)
    if partition is not min_cut and patches.get("custom_partitioner_fn") is None:
        patches["custom_partitioner_fn"] = _Partition(partition, key)
    compiled = partial(compile_fx.compile_fx, gm, list(inputs), config_patches=patches)
    dynamic = any(map(is_dynamic, inputs))
    with keyed(key):
        if not _changes(participants, dynamic):
            # The backward may be compiled only when it first runs, outside compile_fx.
            return cast(Callable[..., Any], compiled(inner_compile=keyed(key)(compile_fx.compile_fx_inner)))
        stores = not (dynamic or participants.observer.dumps) and stores_backwards() and is_cacheable(gm)
        late = stores or (options.scaler is not None and not dynamic)  # so that kernels may overwrite saved tensors
        inner = _Inner(participants.with_late_backward() if late else participants, key, patches, stores)
        if stores:
            cache = storing_backwards(load=inner.backward, scaler=options.scaler)
        else:  # AOTAutograd's cache would return a backward that is not rewritten.
            cache = functorch_config.patch(enable_autograd_cache=False)
        with cache:
            return cast(Callable[..., Any], compiled(inner_compile=inner.compile))


def _changes(participants: Participants, dynamic: bool) -> bool:
    """Whether fxamp changes AOTAutograd's graphs: by a participant, or by the passes that make every backward cheaper.

    Those passes apply to graphs with fixed sizes, on every device but the CPU.
    """
    chunks = participants.policy is not None and participants.policy.has_rules_for(LOSS)
    must = bool(participants.members) or participants.observer.dumps or chunks
    return must or (participants.device not in (None, "cpu") and not dynamic)


@dataclass(frozen=True)
class _Inner:
    """Inductor's inner compiler for graphs that change.

    ``key`` identifies the graph and its changes in the keys of torch's caches. ``patches``: Inductor's settings.
    ``stores``: AOTAutograd's cache stores the graphs.
    """

    participants: Participants
    key: str
    patches: Mapping[str, Any]
    stores: bool

    def compile(self, gm: GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        """Compile one of AOTAutograd's graphs, as ``compile_fx_inner`` does."""
        if not settings.get("is_backward"):
            return self.participants.forward(self._compiler(settings))(gm, inputs)
        run = self.backward(gm, inputs, settings)
        return StoredBackward(gm, inputs, settings, run) if self.stores else run

    def backward(self, gm: GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Boxed:
        """Compile the backward ``gm``, which AOTAutograd has derived or its cache returns."""
        return self.participants.backward(self._compiler(settings))(gm, inputs)

    def _compiler(self, settings: Mapping[str, Any]) -> GraphCompiler:
        limits = self._limits_of_ops(bool(settings.get("is_backward")))
        usual = {"realize_opcount_threshold": max(limits)} if limits else {}

        def compile_inner(gm: GraphModule, inputs: Sequence[Any]) -> Any:
            # A backward may be compiled only when it first runs, outside compile_fx.
            with config.patch({**usual, **self.patches}), keyed(f"{self.key} {donated_inputs()}"):
                return compile_fx.compile_fx_inner(gm, inputs, **settings)

        return compile_inner

    def _limits_of_ops(self, backward: bool) -> list[int]:
        """Return after how many ops Inductor may write a value to memory, for each reason for another limit."""
        policy, device = self.participants.policy, self.participants.device
        in_8_bits = policy is not None and (policy.has_fp8 or policy.has_rules_for(KEPT))
        in_chunks = policy is not None and policy.has_rules_for(LOSS)
        scaled = self.participants.options.scaler is not None and device not in (None, "cpu")
        reasons = {
            _OPS_WITH_8_BITS_OR_CHUNKS: in_chunks or (backward and in_8_bits),
            _OPS_SCALED: backward and scaled,
            _OPS_WITH_4_BITS: policy is not None and Category.NVFP4 in policy.products,
        }
        return [limit for limit, holds in reasons.items() if holds]


class _Partition(CustomPartitionerFn):
    """A partitioner in the form that Inductor expects; ``key`` identifies it in Inductor's caches."""

    def __init__(self, partition: Partitioner, key: str) -> None:
        self._partition, self._key = partition, key

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Return the key, which contains the policy and fxamp's code."""
        return self._key

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Partition":
        """Return self: Inductor copies its settings, but fxamp must see what gets compiled."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the key alone: torch's caches pickle their settings to make keys, and load none of them."""
        return str, (self._key,)
