"""What fxamp.rewrite makes of a call of a public function, and the real autocast: dtypes, and on the CPU values.

``PYTHONPATH=tests python -m oracle.public_agreement [device ...]`` compares every sample of torch's op database; the
tests compare the first sample of every function.
"""

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from support.checks.equality import assert_equal
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map

import fxamp
from fxamp.policy import Policy
from oracle.dtypes import Dtypes, output_dtypes
from oracle.observe import autocast
from oracle.public_gaps import ACCEPTED, UNTRACED
from oracle.public_ops import Call, calls, program

LOWER = {
    "cpu": torch.bfloat16,
    "cuda": torch.float16,
    "xpu": torch.float16,
    "mps": torch.float16,
    "mtia": torch.float16,
}

#: Ops that hand out memory as it is.
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})


def policy_for(device: str) -> Policy:
    """Return the shipped policy that :func:`disagreements` holds against the device's autocast."""
    return Policy.load(f"{device}-{str(LOWER[device]).removeprefix('torch.')}").resolve(device)


@dataclass(frozen=True)
class Disagreement:
    """In which mixture fxamp does otherwise, and how; ``wider``: its results are wider, or equal in dtype."""

    mixture: str
    how: str
    wider: bool


def disagreements(call: Call, policy: Policy, mixtures: Sequence[str] = ()) -> Iterator[Disagreement]:
    """Yield where fxamp does otherwise than autocast, in ``mixtures`` or in all; what autocast refuses is left out.

    On the CPU everything runs for real, and values are compared bit for bit where the dtypes agree and are not random.
    """
    together = list(mixtures or call.mixtures())
    real = _real(call, together, policy)
    ours = None if real is None else _ours(call, together, policy)
    if ours is not None and not isinstance(ours, str):
        yield from _compared(call, together, policy, real, ours)
        return
    for mixture in together:
        if (real := _real(call, [mixture], policy)) is not None:
            yield from _compared(call, [mixture], policy, real, _ours(call, [mixture], policy))


def accepted(call: Call, difference: Disagreement) -> bool:
    """Say whether a disagreement is one of the few that have a reason."""
    return difference.wider and call.name in ACCEPTED


def _compared(
    call: Call, mixtures: list[str], policy: Policy, real: Any, ours: "str | tuple[Any, bool]"
) -> Iterator[Disagreement]:
    if isinstance(ours, str):
        if policy.device not in UNTRACED.get(call.name, ()) and _runs_on_fakes(call, mixtures):
            yield Disagreement(mixtures[0], ours, wider=False)
        return
    results, repeatable = ours
    for mixture, autocasts, dtypes in zip(mixtures, real, results, strict=True):
        before, after = output_dtypes(autocasts), output_dtypes(dtypes)
        if before != after:
            wider = _wider(after, before)
            if not wider or policy.device == "cpu" or not _refused_on_the_cpu(call, mixture):
                yield Disagreement(mixture, f"autocast {_short(before)}, fxamp {_short(after)}", wider)
        elif repeatable and policy.device == "cpu" and (how := _other_values(autocasts, dtypes)):
            yield Disagreement(mixture, how, wider=True)


def _other_values(real: Any, ours: Any) -> str | None:
    try:
        assert_equal(ours, real, equal_nan=True)
    except AssertionError as error:
        return f"other values: {str(error).splitlines()[0]}"
    return None


def _wider(mine: Dtypes, theirs: Dtypes) -> bool:
    """Say whether no result is narrower than wanted."""
    return len(mine) == len(theirs) and all(
        ours == real or (ours.is_complex == real.is_complex and ours.itemsize > real.itemsize)
        for ours, real in zip(mine, theirs, strict=True)
    )


def _refused_on_the_cpu(call: Call, mixture: str) -> bool:
    """Say whether the CPU's kernels refuse what a fake kernel of the device took."""
    module, inputs = program(call, [mixture], "cpu")
    narrow = [node for node in module.graph.nodes if node.target is not call.function and node.op == "call_function"]
    positions = {module.graph.find_nodes(op="placeholder").index(node.args[0]) for node in narrow}
    for node in narrow:
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
    module.recompile()
    halves = [x.half() if i in positions else x for i, x in enumerate(inputs)]
    return _run(module, halves) is None


def _runs_on_fakes(call: Call, mixtures: Sequence[str]) -> bool:
    """Say whether the call can be traced at all: whether its path or its shapes depend on no values."""
    module, inputs = program(call, mixtures, "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, autocast("cpu", LOWER["cpu"]):
        return _run(module, [mode.from_tensor(x) for x in inputs]) is not None


def _real(call: Call, mixtures: Sequence[str], policy: Policy) -> Any:
    """What the real autocast gives; None if it refuses."""
    module, inputs = program(call, mixtures, policy.device)
    with _there(inputs, policy.device) as placed, autocast(policy.device, LOWER[policy.device]):
        return _run(module, placed)


def _run(module: GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
    torch.manual_seed(0)
    try:
        return Interpreter(module).run(*inputs)
    except Exception:  # kernels, fake ones too, raise whatever they like
        return None


def _ours(call: Call, mixtures: Sequence[str], policy: Policy) -> "str | tuple[Any, bool]":
    """What fxamp gives, mixture by mixture, and whether the values repeat; or why it gives nothing."""
    module, inputs = program(call, mixtures, policy.device)
    with _there(inputs, policy.device) as placed:
        examples = placed
    try:
        rewritten = fxamp.rewrite(module, examples, policy=policy)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}"
    repeatable = not any(_draws(node) for node in rewritten.graph.nodes)
    if policy.device == "cpu":
        results = _run(rewritten, inputs)
        return (results, repeatable) if results is not None else "the rewritten program fails"
    [output] = rewritten.graph.find_nodes(op="output")
    return tree_map(lambda leaf: leaf.meta["val"] if isinstance(leaf, Node) else leaf, output.args[0]), repeatable


def _draws(node: Node) -> bool:
    """Say whether the values of a node differ from run to run: random numbers (samples set seeds), memory as it is."""
    if not isinstance(node.target, OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in node.target.tags or node.target._opname in _UNWRITTEN


@contextmanager
def _there(inputs: Sequence[torch.Tensor], device: str) -> Iterator[list[torch.Tensor]]:
    """``inputs`` on a device that need not be there: as FakeTensors, but on the CPU."""
    if device == "cpu":
        yield list(inputs)
        return
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in inputs]


def _short(dtypes: Dtypes) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def main(arguments: Sequence[str]) -> int:
    """Compare every sample of every function on the devices named (all, if none is); print what differs."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    failures = 0
    for device in arguments or LOWER:
        policy, compared = policy_for(device), 0
        for compared, call in enumerate(calls(every=True), 1):  # noqa: B007
            for one in disagreements(call, policy):
                failures += not accepted(call, one)
                note = " (accepted)" if accepted(call, one) else ""
                print(f"{device}  {call.title}  {one.mixture}: {one.how}{note}", flush=True)
        print(f"{device}: {compared} calls", flush=True)
    print(f"{failures} disagreements")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
