"""Every op that torch registers for autocast, on every device: ``fxamp.rewrite`` compared with the real autocast.

Autocast runs on FakeTensors of the device, which need not be there.
"""

from collections.abc import Iterator, Sequence

import pytest
import torch
from oracle.gaps import NO_FAKE_KERNEL, UNSEEN, UNTRACED, names_dimensions, really_refused
from oracle.observe import Observation, observe
from oracle.rewritten import rewritten
from oracle.samples import SAMPLES, Variant, samples
from support.checks.exhaustive import exhaustive
from torch._subclasses.fake_tensor import FakeTensorMode

from fxamp.devices import DEVICES
from fxamp.errors import BannedOpError, CaptureError
from fxamp.policy import Category, Policy

# Some ops are deprecated and say so; fake kernels log what they refuse.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_logging")]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BRIEF = ("all torch.float32", "torch.float32 with torch.float16 at 0", "torch.float32 with torch.bfloat16 at 0")


def registered(device: str) -> list[str]:
    """Return the names of the overloads that torch registers for a device's autocast."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")
    return sorted(name for name in names if not name.startswith("programs::"))  # ops of other tests


def runnable(device: str) -> list[str]:
    """Return those whose autocast kernel runs here."""
    return [name for name in registered(device) if name not in UNSEEN and not names_dimensions(name)]


@pytest.mark.parametrize("device", DEVICES)
def test_every_registered_op_has_a_sample_and_a_rule(device: str) -> None:
    policy = Policy.load(f"{device}-float16").resolve(device)
    assert [name for name in runnable(device) if name not in SAMPLES] == []
    assert [name for name in registered(device) if policy.rule_for(name) is None] == []


@pytest.mark.parametrize("device", DEVICES)
def test_every_op_of_a_rule_is_registered(device: str) -> None:
    """A rule names nothing that autocast leaves alone. Ops of another build (cuDNN) are not in this one."""
    policy = Policy.load(f"{device}-float16").resolve(device)
    names = set(registered(device))
    covered = names | {name.partition(".")[0] for name in names} | {f"{name}.default" for name in names}
    assert {op for rule in policy.rules for op in rule.ops} - covered <= set(UNSEEN)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rule_covers_no_other_overload_that_autocast_leaves_alone(device: str) -> None:
    policy = Policy.load(f"{device}-float16").resolve(device)
    too_many = []
    for packet in sorted({name.partition(".")[0] for name in runnable(device)}):
        for schema in torch._C._jit_get_schemas_for_operator(packet):
            name = f"{packet}.{schema.overload_name}".rstrip(".")
            alone = name not in registered(device) and not schema.is_mutable and "Tensor" in str(schema)
            # Upsampling's "vec" forms, which the Python functions call, run the registered ones.
            if alone and schema.overload_name != "vec" and policy.rule_for(name) is not None:
                too_many.append(name)
    assert too_many == []


@pytest.mark.parametrize("device", exhaustive(DEVICES, always=["cpu"]))
def test_only_the_named_ops_have_no_fake_kernel(device: str) -> None:
    failing = set()
    for name in runnable(device):
        variant = next(samples(name, torch.float16))
        with FakeTensorMode():
            if observe(variant.op, *variant.build(device), device, torch.float16).kernel_error is not None:
                failing.add(name)
    assert failing <= set(NO_FAKE_KERNEL)


#: Devices, dtypes, and whether :func:`variants` are brief there; two of them have the tables that others share.
REWRITES = [(device, dtype, True) for device in DEVICES for dtype in DTYPES]
REWRITES += [(device, "float16", False) for device in ("cuda", "cpu")]


@pytest.mark.parametrize("run", exhaustive(REWRITES, always=[("cuda", "float16", True)]))
def test_rewrite_agrees(run: tuple[str, str, bool]) -> None:
    device, dtype, brief = run
    policy = Policy.load(f"{device}-{dtype}").resolve(device)
    differing, compared = [], []
    for name, variant in variants(device, DTYPES[dtype], brief):
        complaint = compare_rewrite(policy, variant)
        compared += [name] if complaint is not None else []
        if complaint:
            differing.append(f"{variant.op} {variant.label}: {complaint}")
    assert covered_by(compared, device)
    assert set(runnable(device)) - set(compared) <= set(NO_FAKE_KERNEL)
    assert not differing, "\n".join(differing)


@pytest.mark.parametrize("device", ["cuda", "xpu", "mtia"])
def test_binary_cross_entropy_is_refused_with_torchs_own_advice(device: str) -> None:
    policy = Policy.load(f"{device}-float16").resolve(device)
    variant = next(samples("aten::binary_cross_entropy", torch.float16))
    rule = policy.rule_for("aten::binary_cross_entropy")
    assert rule is not None and rule.cast is Category.BANNED
    with FakeTensorMode():
        inputs = variant.build(device)
        real = observe(variant.op, *inputs, device, torch.float16)
    assert rule.advice.strip() in str(real.refused)
    refused = rewritten(policy, variant.op, *inputs).refused
    assert isinstance(refused, BannedOpError) and rule.advice in str(refused)


def covered_by(compared: Sequence[str], device: str) -> bool:
    """Say whether nearly all ops that are registered were compared, and some of them in several calls."""
    return len(compared) > len(set(compared)) >= 0.85 * len(registered(device))


def variants(device: str, lower: torch.dtype, brief: bool) -> Iterator[tuple[str, Variant]]:
    """Yield each op and a call to try; ``brief`` leaves out what a shared table has shown elsewhere."""
    for name in runnable(device):
        for variant in samples(name, lower):
            if not brief or variant.label in BRIEF:
                yield name, variant


def agree(one: Observation, other: Observation, variant: Variant) -> bool:
    """Say whether two sides did the same: same refusal, or same op on same dtypes with same results.

    What an in-place or ``out=`` call returns is its caller's tensor; what it calls inside is its own business.
    """
    if one.refused or other.refused:
        return bool(one.refused and other.refused)
    called = (one.executed, one.inputs, one.dtype) == (other.executed, other.inputs, other.dtype)
    if variant.op._schema.is_mutable:
        return called
    return called and one.outputs == other.outputs and bool(one.kernel_error) == bool(other.kernel_error)


def compare_rewrite(policy: Policy, variant: Variant) -> str | None:
    """Return what fxamp.rewrite does otherwise than autocast ("" if nothing), None if neither can run the call."""
    device = policy.device
    with FakeTensorMode() as mode:
        real = observe(variant.op, *variant.build(device), device, DTYPES[policy.lower_precision_fp])
        plain = runs(variant, device)
    under_autocast = real.refused is None and real.kernel_error is None
    if not plain and not under_autocast:
        return None
    with mode:
        inputs = variant.build(device)
    ours = rewritten(policy, variant.op, *inputs)
    if agree(real, ours, variant) or excused(policy, variant, real, ours):
        return ""
    return f"\n  autocast {real}\n  rewrite  {ours}"


def runs(variant: Variant, device: str) -> bool:
    """Say whether the call runs without autocast."""
    args, kwargs = variant.build(device)
    try:
        variant.op(*args, **kwargs)
    except Exception:  # fake kernels raise whatever they like
        return False
    return True


def excused(policy: Policy, variant: Variant, real: Observation, ours: Observation) -> bool:
    """Say whether fxamp rightly does otherwise: a program that runs without autocast must run under every policy.

    1. Autocast refuses two 16-bit dtypes in a promoting op; fxamp runs it in float32.
    2. A call on an absent device cannot be captured there; the few such calls are named.
    3. Autocast gives a kernel a mixture of float64 and 16 bits that only a fake kernel takes; fxamp widens the rest.
    """
    rule = policy.rule_for(variant.op.name())
    if isinstance(ours.kernel_error, CaptureError):
        return variant.op.name() in UNTRACED and policy.device != "cpu"
    if real.refused is not None:
        return rule is not None and rule.cast is Category.PROMOTE and set(ours.inputs) == {torch.float32}
    if torch.float64 not in variant.dtypes or ours.refused is not None:
        return False
    return set(ours.inputs) == {torch.float64} and really_refused(variant.op, variant.sample, real.inputs)
