"""The ops of :mod:`fxamp.kernels.small_floats` as lines of generated Triton code, with the same results bit for bit."""

from fxamp.kernels.small_floats import BLOCK, CODES, LARGEST, MULTIPLIERS, NEXT, STRIDE


def mixed_lines(name: str) -> list[str]:
    """Return lines that hash the int32 with this name, in place."""
    return [
        f"{name} = {name} ^ (({name} >> 16) & 0xFFFF)",
        f"{name} = {name} * {MULTIPLIERS[0]}",
        f"{name} = {name} ^ (({name} >> 15) & 0x1FFFF)",
        f"{name} = {name} * ({MULTIPLIERS[1]})",
        f"{name} = {name} ^ (({name} >> 16) & 0xFFFF)",
    ]


def key_lines(name: str, count: str, stream: str) -> list[str]:
    """Return lines that compute the key of a step's random bits."""
    return [
        f"{name} = {count} * ({STRIDE}) + 1",
        *mixed_lines(name),
        f"{name} = {name} ^ {stream}",
        *mixed_lines(name),
    ]


def random_lines(name: str, key: str, slot: int) -> list[str]:
    """Return lines that compute random bits from each element's index and the key."""
    return [
        f"{name} = (first + offsets).to(tl.int32) ^ {key}",
        *mixed_lines(name),
        f"{name} = {name} + {NEXT * (slot + 1) % (1 << 31)}",
        *mixed_lines(name),
    ]


def scales_lines(name: str, value: str, block: int, masked: bool) -> list[str]:
    """Return lines that compute the exponents of 256-element blocks; elements outside the parameter count as zeros."""
    rows = block // BLOCK
    bits = f"{value}.to(tl.int32, bitcast=True) & 0x7FFFFFFF"
    return [
        f"{name}_bits = {f'tl.where(inside, {bits}, 0)' if masked else bits}",
        f"{name} = tl.max(tl.reshape({name}_bits, ({rows}, {BLOCK})), axis=1) >> 23",
    ]


def spread(scales: str, block: int) -> str:
    """Return the expression for each element's value of one that its block has."""
    rows = block // BLOCK
    return f"tl.reshape(tl.broadcast_to(tl.reshape({scales}, ({rows}, 1)), ({rows}, {BLOCK})), ({block},))"


def encode_lines(name: str, value: str, scales: str, key: str, code: str, slot: int, block: int) -> list[str]:
    """Return lines that encode values, as int32."""
    form = CODES[code]
    shift = 23 - form.mantissa
    lines = [
        f"{name}_factors = ((254 - tl.minimum({scales}, {LARGEST})) << 23).to(tl.float32, bitcast=True)",
        f"{name}_x = tl.abs({value}) * {spread(f'{name}_factors', block)}",
    ]
    share, part = "0.5", str(1 << (shift - 1))
    if slot >= 0:
        lines += random_lines(f"{name}_random", key, slot)
        share = f"(({name}_random >> 8) & 0xFFFFFF).to(tl.float32) * {2.0**-24!r}"
        part = f"(({name}_random >> {32 - shift}) & {(1 << shift) - 1})"
    lines += [
        f"{name}_small = ({name}_x * {1.0 / form.quantum!r} + {share}).to(tl.int32)",
        f"{name}_large = ({name}_x.to(tl.int32, bitcast=True) + ({part} - {form.normal - (1 << 23)})) >> {shift}",
        f"{name}_found = tl.minimum(tl.where({name}_x < {form.least!r}, {name}_small, {name}_large), {form.top})",
    ]
    if form.signed:
        return [*lines, f"{name} = {name}_found | tl.where(({value} < 0) & ({name}_found > 0), 0x80, 0)"]
    return [*lines, f"{name} = tl.where({value} > 0, tl.maximum({name}_found, 1), 0)"]


def decode_lines(name: str, codes: str, scales: str, code: str, block: int) -> list[str]:
    """Return lines that decode int32 codes: as bits of float32, subnormals included, times a power of two."""
    form = CODES[code]
    magnitude = f"({codes} & 0x7F)" if form.signed else codes
    bits = f"({magnitude} << {23 - form.mantissa})" + (f" | (({codes} & 0x80) << 24)" if form.signed else "")
    return [
        f"{name}_exponents = tl.where({scales} == 255, 255, tl.minimum({scales}, {LARGEST}))",
        f"{name}_factors = ({name}_exponents << 23).to(tl.float32, bitcast=True)",
        f"{name} = ({bits}).to(tl.float32, bitcast=True) * {form.least * 2.0**126!r}"
        f" * {spread(f'{name}_factors', block)}",
    ]


def chance_lines(name: str, value: str, key: str, slot: int) -> list[str]:
    """Return lines that round float32 stochastically to a float32 that bfloat16 can represent."""
    return [
        *random_lines(f"{name}_random", key, slot),
        f"{name}_bits = {value}.to(tl.int32, bitcast=True)",
        f"{name}_up = (({name}_bits + ({name}_random & 0xFFFF)) >> 16) << 16",
        f"{name} = tl.where({value} != {value}, 0x7FC00000, {name}_up).to(tl.float32, bitcast=True)",
    ]
