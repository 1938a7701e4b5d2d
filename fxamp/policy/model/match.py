"""The ``[match]`` table: the machines that a policy is for, and the facts about the machine that runs a program.

The GPUs of torch's "cuda" come from two vendors. A compute capability describes NVIDIA's. torch reports one for AMD's
too, but it says nothing about features: gfx90a, with (9, 0), has no 8-bit products, while NVIDIA's GPUs have them from
(8, 9) on. So ``capability`` is for NVIDIA's GPUs, ``arch`` names AMD's, and a policy with only one of the two is for
that vendor only.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from fxamp.errors import nearest
from fxamp.policy.model.comparisons import holds, installed_torch_version, meets, parse, parse_version, version_parts
from fxamp.policy.model.recipe import FNUZ

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

LACKS_FP8 = tuple(_WITHOUT_FP8.split())
"""AMD GPUs that have no products in 8 bits."""

FNUZ_ARCHITECTURE = "gfx942"
"""The AMD GPU whose 8-bit products exist in the fnuz formats only."""

OF_EXPERTS = " of experts"
"""The suffix of the name of a cast to 8 bits, for products whose weight has a matrix for each expert."""

EXPERTS_CAPABILITY = {"fp8": ">=9.0,<11.0", "mxfp8": ">=10.0,<11.0"}
"""The NVIDIA GPUs for which torch has grouped products in a format."""

EXPERTS_ARCHITECTURES = (FNUZ_ARCHITECTURE, "gfx950")
"""The AMD GPUs for which torch has grouped products in fp8."""

LEAST_CAPABILITY = {"fp8": (8, 9), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""The NVIDIA GPUs that multiply in a format, by its cast."""

ARCHITECTURES = (*LACKS_FP8, FNUZ_ARCHITECTURE, "gfx950", "gfx1200", "gfx1201")
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

    def recipe(self, name: str) -> str:
        """Return the recipe for the one that a rule names, in the 8-bit formats that the machine has."""
        return FNUZ.get(name, name) if self.arch == FNUZ_ARCHITECTURE else name


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


@dataclass(frozen=True)
class Match:
    """The conditions on a machine; empty ones always hold."""

    device: str
    capability: str = ""
    arch: tuple[str, ...] = ()
    cpu_features: tuple[str, ...] = ()
    torch: str = ""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield ``(key, message)`` for every condition that is malformed, or that the device does not support."""
        checks: list[tuple[str, Callable[[str], object], str]] = [
            ("torch", parse_version, self.torch),
            ("capability", capability_condition, self.capability),
        ]
        checks += [("cpu_features", cpu_feature, name) for name in self.cpu_features]
        checks += [("arch", architecture, name) for name in self.arch]
        for key, check, value in checks:
            try:
                if value:
                    check(value)
            except ValueError as error:
                yield key, str(error)
        for key, device in (("capability", "cuda"), ("arch", "cuda"), ("cpu_features", "cpu")):
            if getattr(self, key) and self.device != device:
                yield key, f"{key} is for device = {device!r}, but this policy has device = {self.device!r}"

    def mismatches(self, machine: Machine, casts: Collection[str] = (), recipes: Collection[str] = ()) -> Iterator[str]:
        """Describe each condition that ``machine`` fails; unknown facts are not checked.

        ``casts``: those of "fp8", "mxfp8" and "nvfp4" in which the policy runs products; "fp8 of experts" and so on for
        products of experts. ``recipes``: the recipes that its rules name.
        """
        if self.torch and not holds(self.torch, machine.torch):
            yield f"torch {self.torch}, but this is torch {machine.torch}"
        if machine.arch is not None:
            yield from self._of_amd(machine.arch, casts)
        elif machine.capability is not None:
            yield from self._of_nvidia(machine.capability, casts)
        if machine.arch not in (None, FNUZ_ARCHITECTURE) or machine.capability is not None:
            this = f"AMD's {machine.arch}" if machine.arch is not None else "NVIDIA's"
            for recipe in sorted(recipe for recipe in recipes if recipe in FNUZ.values()):
                yield f"products in AMD's fnuz formats (recipe {recipe!r}): {FNUZ_ARCHITECTURE}, but this GPU is {this}"
        if machine.cpu_features is not None and (missing := set(self.cpu_features) - machine.cpu_features):
            lacking = ", ".join(name for name in self.cpu_features if name in missing)
            yield f"the CPU features {', '.join(self.cpu_features)}, but this CPU lacks {lacking}"

    def _of_nvidia(self, capability: tuple[int, ...], casts: Collection[str]) -> Iterator[str]:
        number = ".".join(map(str, capability))
        if self.capability and not meets(parse(self.capability, "compute capability", CAPABILITY), capability):
            yield f"compute capability {self.capability}, but this device has {number}"
            return
        for cast in sorted(casts):
            cast, of_experts, _ = cast.partition(OF_EXPERTS)
            accepted = EXPERTS_CAPABILITY[cast] if of_experts else ""
            if accepted and not meets(parse(accepted, "compute capability", CAPABILITY), capability):
                yield f"products of experts in {cast}: compute capability {accepted}, but this device has {number}"
            elif capability < LEAST_CAPABILITY[cast]:
                least = ".".join(map(str, LEAST_CAPABILITY[cast]))
                yield f"products in {cast}: compute capability >={least}, but this device has {number}"
        if self.arch and not self.capability:
            yield f"an AMD GPU ({', '.join(self.arch)}), but this one is NVIDIA's, of compute capability {number}"

    def _of_amd(self, arch: str, casts: Collection[str]) -> Iterator[str]:
        if self.arch and arch not in self.arch:
            yield f"{' or '.join(self.arch)} where the GPU is AMD's, but this one is {arch}"
        if self.capability and not self.arch:
            yield f"an NVIDIA GPU of compute capability {self.capability}, but this one is AMD's {arch}"
        if "fp8" in casts and arch in LACKS_FP8:
            yield f"products in fp8, but {arch} has no products in 8 bits"
        elif f"fp8{OF_EXPERTS}" in casts and arch not in EXPERTS_ARCHITECTURES:
            yield f"products of experts in fp8: {' or '.join(EXPERTS_ARCHITECTURES)}, but this one is AMD's {arch}"
        for cast in sorted({cast for cast in casts if OF_EXPERTS not in cast} - {"fp8"}):
            yield f"products in {cast}, which fxamp lays out for NVIDIA GPUs only, but this one is AMD's {arch}"

    def unchecked(self, machine: Machine) -> Iterator[str]:
        """Yield the conditions that cannot be checked because the facts are unknown."""
        gpu = machine.capability is None and machine.arch is None
        if self.capability and gpu:
            yield f"capability {self.capability}"
        if self.arch and gpu:
            yield f"arch {', '.join(self.arch)}"
        if self.cpu_features and machine.cpu_features is None:
            yield f"cpu_features {', '.join(self.cpu_features)}"
