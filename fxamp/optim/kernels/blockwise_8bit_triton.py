"""The ops of :mod:`fxamp.kernels.blockwise_8bit` as lines of generated Triton code, with the same bits."""

from fxamp.kernels.blockwise_8bit import BLOCK, CODES, LARGEST, LAST, ROUNDS, STRIDE, signed, successor


def mixed_lines(name: str) -> list[str]:
    """Return lines that hash the int32 with this name, in place."""
    rounds = [
        line for shift, factor in ROUNDS for line in (_shifted(name, shift), f"{name} = {name} * ({signed(factor)})")
    ]
    return [*rounds, _shifted(name, LAST)]


def _shifted(name: str, shift: int) -> str:
    return f"{name} = {name} ^ (({name} >> {shift}) & {(1 << (32 - shift)) - 1:#x})"


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
        *([f"{name} = {name} * ({successor(slot)})"] if slot else []),
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
    """Return lines that encode values, as int32.

    A product with a power of two makes a code's smallest normal value float32's, so that its leading bits are codes, of
    subnormal values too.
    """
    form = CODES[code]
    shift = 23 - form.mantissa
    lines = [
        f"{name}_factors = ((254 - tl.minimum({scales}, {LARGEST})) << 23).to(tl.float32, bitcast=True)",
        f"{name}_bits = {value}.to(tl.int32, bitcast=True)",
        f"{name}_magnitude = {f'{name}_bits & 0x7FFFFFFF' if form.signed else f'tl.maximum({name}_bits, 0)'}",
        f"{name}_x = {name}_magnitude.to(tl.float32, bitcast=True) * {spread(f'{name}_factors', block)}",
        f"{name}_x = ({name}_x * {2.0**-126 / form.least!r}).to(tl.int32, bitcast=True)",
    ]
    part = str(1 << (shift - 1))
    if slot >= 0:
        lines += random_lines(f"{name}_random", key, slot)
        part = f"(({name}_random >> {32 - shift}) & {(1 << shift) - 1})"
    lines.append(f"{name}_codes = tl.minimum(({name}_x + {part}) >> {shift}, {form.top})")
    if form.signed:
        return [*lines, f"{name} = {name}_codes | (({name}_bits >> 24) & 0x80)"]
    return [*lines, f"{name} = tl.maximum({name}_codes, tl.minimum({name}_magnitude, 1))"]


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


def stochastic_round_lines(name: str, value: str, key: str, slot: int) -> list[str]:
    """Return lines that round float32 stochastically to a float32 that bfloat16 can represent."""
    return [
        *random_lines(f"{name}_random", key, slot),
        f"{name}_bits = {value}.to(tl.int32, bitcast=True)",
        f"{name}_up = (({name}_bits + (({name}_random >> 16) & 0xFFFF)) >> 16) << 16",
        f"{name} = tl.where({value} != {value}, 0x7FC00000, {name}_up).to(tl.float32, bitcast=True)",
    ]
