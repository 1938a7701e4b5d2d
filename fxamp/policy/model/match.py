"""The ``[match]`` table: the machines that a policy is for, and the facts about the machine at hand."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fxamp.errors import nearest
from fxamp.policy.model.comparisons import meets, parse
from fxamp.policy.model.versions import holds, installed_torch_version, parse_condition, version_parts

_X86 = """
    sse sse2 sse3 ssse3 sse4_1 sse4_2 sse4a avx avx2 avx_vnni avx512_f avx512_cd avx512_dq avx512_bw avx512_vl
    avx512_ifma avx512_vbmi avx512_vbmi2 avx512_bitalg avx512_vpopcntdq avx512_vnni avx512_bf16 avx512_fp16
    avx512_vp2intersect avx512_4vnniw avx512_4fmaps avx10_1 avx10_2 avx_vnni_int8 avx_vnni_int16 avx_ne_convert
    amx_bf16 amx_tile amx_int8 amx_fp16 fma3 fma4 f16c bmi bmi2 popcnt lzcnt aes sha clflush clflushopt clwb
"""
_ARM = "neon fp16_arith bf16 i8mm dot sve sve2 sve_bf16 sme sme2"

CPU_FEATURES = tuple((_X86 + _ARM).split())
"""The names that ``torch.cpu.get_capabilities()`` documents."""

CAPABILITY = "comparisons joined by commas, such as '>=8.0' or '>=8.0,<9.0'"


@dataclass(frozen=True)
class Machine:
    """The machine that a program runs on; None means unknown.

    ``torch``: its version. ``capability``: CUDA's compute capability, ``(8, 0)``, as torch reports it, also for AMD
    GPUs. ``cpu_features``: names of :data:`CPU_FEATURES`.
    """

    torch: str
    capability: tuple[int, ...] | None = None
    cpu_features: frozenset[str] | None = None


def machine(
    torch_version: str | None, capability: "str | tuple[int, ...] | None", cpu_features: Iterable[str] | None
) -> Machine:
    """Return the machine with these facts; the default for ``torch_version`` is the installed torch."""
    version = installed_torch_version() if torch_version is None else torch_version
    numbers = version_parts(capability) if isinstance(capability, str) else capability
    return Machine(version, numbers, None if cpu_features is None else frozenset(cpu_features))


def capability_condition(text: str) -> str:
    """Return ``text`` if it is a condition on a compute capability; raise ValueError otherwise."""
    parse(text, "compute capability", CAPABILITY)
    return text


def cpu_feature(name: str) -> str:
    """Return ``name`` if it is a CPU feature that torch reports; raise ValueError otherwise."""
    if name in CPU_FEATURES:
        return name
    hint = nearest(name, CPU_FEATURES)
    raise ValueError(
        f"{name!r} is not a CPU feature that torch reports; accepted: such as 'avx512_bf16', 'amx_bf16'{hint}"
    )


def match_problems(device: str, torch: str, capability: str, features: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield ``(key, message)`` for every condition that is malformed, or that this device does not support."""
    checks: list[tuple[str, Callable[[str], object], str]] = [
        ("torch", parse_condition, torch),
        ("capability", capability_condition, capability),
    ]
    for key, check, given in [*checks, *(("cpu_features", cpu_feature, name) for name in features)]:
        try:
            if given:
                check(given)
        except ValueError as error:
            yield key, str(error)
    for key, present, wanted in (("capability", bool(capability), "cuda"), ("cpu_features", bool(features), "cpu")):
        if present and device != wanted:
            yield key, f"{key} is for device = {wanted!r}, but this policy has device = {device!r}"


def mismatches(torch: str, capability: str, features: tuple[str, ...], here: Machine) -> list[str]:
    """Describe each condition that ``here`` fails; empty ones always hold, unknown facts are not checked."""
    found = []
    if torch and not holds(torch, here.torch):
        found.append(f"torch {torch}, but this is torch {here.torch}")
    if here.capability is not None and not _capable(capability, here.capability):
        found.append(f"compute capability {capability}, but this device has {'.'.join(map(str, here.capability))}")
    missing = [name for name in features if here.cpu_features is not None and name not in here.cpu_features]
    if missing:
        found.append(f"the CPU features {', '.join(features)}, but this CPU lacks {', '.join(missing)}")
    return found


def _capable(condition: str, capability: tuple[int, ...]) -> bool:
    return not condition or meets(parse(condition, "compute capability", CAPABILITY), capability)


def unchecked(capability: str, features: tuple[str, ...], here: Machine) -> tuple[str, ...]:
    """Return the conditions that cannot be checked because the facts are unknown."""
    found = [f"capability {capability}"] if capability and here.capability is None else []
    if features and here.cpu_features is None:
        found.append(f"cpu_features {', '.join(features)}")
    return tuple(found)
