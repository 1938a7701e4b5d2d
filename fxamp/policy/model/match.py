"""The ``[match]`` table: the machines that a policy is for, and the facts about the machine at hand.

The GPUs of torch's "cuda" come from two vendors. A compute capability says what NVIDIA's can do. torch reports one for
AMD's too, but that says nothing: gfx90a, with (9, 0), has no products in 8 bits, while NVIDIA's have them from (8, 9)
on. So ``capability`` is for NVIDIA's, ``arch`` names AMD's, and a policy with only one of them is for that vendor only.
"""

import re
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

_WITHOUT_FP8 = "gfx900 gfx906 gfx908 gfx90a gfx1030 gfx1100 gfx1101 gfx1102 gfx1150 gfx1151"

LACKS_FP8 = {
    **dict.fromkeys(_WITHOUT_FP8.split(), "has no products in 8 bits"),
    "gfx942": "multiplies float8_e4m3fnuz and float8_e5m2fnuz only, which fxamp does not write",
}
"""AMD GPUs on which products in fp8 do not run, and why."""

ARCHITECTURES = (*LACKS_FP8, "gfx950", "gfx1200", "gfx1201")
"""Names of AMD GPUs that builds of torch are made for; others of the form :data:`ARCHITECTURE` are accepted too."""

ARCHITECTURE = "gfx[0-9]+[0-9a-f]{2}"

CAPABILITY = "comparisons joined by commas, such as '>=8.0' or '>=8.0,<9.0'"


@dataclass(frozen=True)
class Machine:
    """The machine that a program runs on; None means unknown.

    ``torch``: its version. ``capability``: an NVIDIA GPU's compute capability, ``(8, 0)``. ``cpu_features``: names of
    :data:`CPU_FEATURES`. ``arch``: an AMD GPU's architecture, such as "gfx942".
    """

    torch: str
    capability: tuple[int, ...] | None = None
    cpu_features: frozenset[str] | None = None
    arch: str | None = None


def machine(
    torch_version: str | None,
    capability: "str | tuple[int, ...] | None",
    cpu_features: Iterable[str] | None,
    arch: str | None,
) -> Machine:
    """Return the machine with these facts; the default for ``torch_version`` is the installed torch."""
    version = installed_torch_version() if torch_version is None else torch_version
    numbers = version_parts(capability) if isinstance(capability, str) else capability
    return Machine(version, numbers, None if cpu_features is None else frozenset(cpu_features), arch)


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


def architecture(name: str) -> str:
    """Return ``name`` if it can be an AMD GPU's architecture; raise ValueError otherwise."""
    if re.fullmatch(ARCHITECTURE, name):
        return name
    hint = nearest(name.lower(), ARCHITECTURES)
    raise ValueError(
        f"{name!r} is not an AMD GPU's architecture; accepted: such as 'gfx942' (capability is for NVIDIA GPUs){hint}"
    )


def match_problems(
    device: str, torch: str, capability: str, features: tuple[str, ...], arch: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield ``(key, message)`` for every condition that is malformed, or that this device does not support."""
    checks: list[tuple[str, Callable[[str], object], str]] = [
        ("torch", parse_condition, torch),
        ("capability", capability_condition, capability),
    ]
    checks += [("cpu_features", cpu_feature, name) for name in features]
    checks += [("arch", architecture, name) for name in arch]
    for key, check, given in checks:
        try:
            if given:
                check(given)
        except ValueError as error:
            yield key, str(error)
    for key, condition, wanted in (
        ("capability", capability, "cuda"),
        ("arch", arch, "cuda"),
        ("cpu_features", features, "cpu"),
    ):
        if condition and device != wanted:
            yield key, f"{key} is for device = {wanted!r}, but this policy has device = {device!r}"


def mismatches(
    torch: str, capability: str, features: tuple[str, ...], arch: tuple[str, ...], here: Machine, fp8: bool
) -> list[str]:
    """Describe each condition that ``here`` fails; empty ones always hold, unknown facts are not checked.

    ``fp8``: whether the policy has products run in fp8.
    """
    found = []
    if torch and not holds(torch, here.torch):
        found.append(f"torch {torch}, but this is torch {here.torch}")
    found += _of_amd(capability, arch, here.arch, fp8) if here.arch is not None else []
    if here.capability is not None and here.arch is None:
        found += _of_nvidia(capability, arch, here.capability)
    missing = [name for name in features if here.cpu_features is not None and name not in here.cpu_features]
    if missing:
        found.append(f"the CPU features {', '.join(features)}, but this CPU lacks {', '.join(missing)}")
    return found


def _of_nvidia(capability: str, arch: tuple[str, ...], has: tuple[int, ...]) -> Iterator[str]:
    shown = ".".join(map(str, has))
    if capability and not meets(parse(capability, "compute capability", CAPABILITY), has):
        yield f"compute capability {capability}, but this device has {shown}"
    if arch and not capability:
        yield f"an AMD GPU ({', '.join(arch)}), but this one is NVIDIA's, of compute capability {shown}"


def _of_amd(capability: str, arch: tuple[str, ...], has: str, fp8: bool) -> Iterator[str]:
    if arch and has not in arch:
        yield f"{' or '.join(arch)} where the GPU is AMD's, but this one is {has}"
    if capability and not arch:
        yield f"an NVIDIA GPU of compute capability {capability}, but this one is AMD's {has}"
    if fp8 and has in LACKS_FP8:
        yield f"products in fp8, but {has} {LACKS_FP8[has]}"


def unchecked(capability: str, features: tuple[str, ...], arch: tuple[str, ...], here: Machine) -> tuple[str, ...]:
    """Return the conditions that cannot be checked because the facts are unknown."""
    known = here.capability is not None or here.arch is not None
    found = [f"capability {capability}"] if capability and not known else []
    found += [f"arch {', '.join(arch)}"] if arch and not known else []
    if features and here.cpu_features is None:
        found.append(f"cpu_features {', '.join(features)}")
    return tuple(found)
