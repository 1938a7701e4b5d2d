"""Generate the Triton source of a kernel from its description: only the conversions and results that it needs.

bfloat16 is passed as 16 bits in a uint16: widening is a shift, narrowing is integer rounding to nearest even. This is
exact in compiled code and in Triton's interpreter, whose own bfloat16 casts truncate.

A gradient that does not start at a multiple of 16 bytes, such as a view into one of DDP's buckets, is split into a head
of a few elements and an aligned rest. Its first program loads the head first and uses it last, so that nothing waits
for the load.
"""

import torch

from fxamp.kernels.launch_plan import ALIGNMENT, CHUNK, Access, Kernel

ROW = 4  # int64 columns of the table of gradients: source address, target address, numel, position in the caller's list

PARAMETERS = {
    "table": "*i64",
    "blocks": "*i64",
    "inv_scale": "*fp32",
    "found_inf": "*fp32",
    "flags": "*i32",
    "partials": "*fp32",
}
SHORT = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}
CARRIER = {torch.float16: "float16", torch.bfloat16: "uint16", torch.float32: "float32", torch.float64: "float64"}
WIDEN = {
    torch.float16: "{loaded}.to(tl.float32)",
    torch.bfloat16: "({loaded}.to(tl.uint32) << 16).to(tl.float32, bitcast=True)",
    torch.float32: "{loaded}",
    torch.float64: "{loaded}",
}
# Steps from "true", in float32, to the stored value, which is the last expression.
NARROW = {
    torch.float16: ("true.to(tl.float16)",),
    torch.bfloat16: (
        "bits = true.to(tl.uint32, bitcast=True)",
        "nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even",
        "rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest).to(tl.uint16)  # NaN stays NaN",
        "rounded",
    ),
    torch.float32: ("true",),
    torch.float64: ("true.to(tl.float64)",),
}

HEAD = '''\
"""{title}.

Aligned to {alignment} bytes: {aligned}. Written by fxamp.kernels.gradient_triton, not to be edited.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment={unaligned})
def {name}({parameters}):
    program = tl.program_id(0)
    row = table + {row} * tl.load(blocks + 2 * program)
    first = tl.load(blocks + 2 * program + 1) * {chunk}  # times a constant, so the compiler sees that it is aligned
'''


def kernel_name(kernel: Kernel) -> str:
    """Return the function's name, for example ``unscale_f16_to_f32`` or ``check_bf16``."""
    if kernel.target is None:
        return f"check_{SHORT[kernel.source]}"
    return f"unscale_{SHORT[kernel.source]}_to_{SHORT[kernel.target]}"


def parameters(kernel: Kernel) -> dict[str, str]:
    """Return the function's parameters, in order, each with its Triton type."""
    absent = {
        "inv_scale": kernel.target is None,
        "found_inf": not kernel.requested.found_inf,
        "flags": not kernel.requested.flags,
        "partials": not kernel.requested.squared_norm,
    }
    return {name: kind for name, kind in PARAMETERS.items() if not absent.get(name, False)}


def source_text(kernel: Kernel) -> str:
    """Return the Python module that defines the kernel."""
    names = list(parameters(kernel))
    head = HEAD.format(
        title=_title(kernel),
        alignment=ALIGNMENT,
        aligned=kernel.access.value,
        unaligned=names[2:],
        name=kernel_name(kernel),
        parameters=", ".join(names),
        row=ROW,
        chunk=CHUNK,
    )
    lines = [
        *_setup(kernel),
        f"for start in range(0, {CHUNK}, {kernel.block}):",
        f"    offsets = {_offsets(kernel)}",
        f"    if start + {kernel.block} <= left:  # a whole block: no mask, so accesses can be {ALIGNMENT} bytes wide",
        *indented(_body(kernel, masked=False), 8),
        "    elif start < left:  # the last elements of the gradient",
        *indented(_body(kernel, masked=True), 8),
        *(_head_body(kernel) if kernel.access is Access.PEELED else []),
        *_results(kernel),
    ]
    return head + "\n".join(indented(lines, 4)) + "\n"


def _title(kernel: Kernel) -> str:
    source, target = (str(dtype).removeprefix("torch.") for dtype in (kernel.source, kernel.target))
    done = f"{source} gradients, checked" if kernel.target is None else f"{source} to {target}, checked and unscaled"
    return done + (", with the sum of squares" if kernel.requested.squared_norm else "")


def _setup(kernel: Kernel) -> list[str]:
    peeled = kernel.access is Access.PEELED
    lines = _head_place(kernel) if peeled else [f"left = tl.minimum(tl.load(row + 2) - first, {CHUNK}).to(tl.int32)"]
    lines.append(_address("source", "row", kernel.source, kernel.access))
    if kernel.target is not None:
        lines.append(_address("target", "row + 1", kernel.target, kernel.access))
        lines.append(f"scale = tl.load(inv_scale){'.to(tl.float64)' if _is_double(kernel) else ''}")
    if peeled:
        lines.append("ahead = tl.load(source - head + lane, mask=in_head, other=0)")
    if _checks(kernel):
        lines.append(f"exponents = tl.full(({kernel.block},), 0, tl.int{_width(kernel)})")
    if kernel.requested.squared_norm:
        lines.append(f"squares = tl.full(({kernel.block},), 0.0, tl.float{_width(kernel)})")
    return lines


def _head_place(kernel: Kernel) -> list[str]:
    """Return the lines that say which elements are the head, and how many of the others are left to a program."""
    size = kernel.source.itemsize
    return [
        "numel = tl.load(row + 2)",
        f"head = ({ALIGNMENT} - tl.load(row) % {ALIGNMENT}) // {size}  # elements before an aligned address",
        f"lane = tl.arange(0, {ALIGNMENT // size})",
        "in_head = lane < tl.where(first == 0, tl.minimum(head, numel), 0)",
        f"left = tl.minimum(numel - head - first, {CHUNK}).to(tl.int32)",
    ]


def _head_body(kernel: Kernel) -> list[str]:
    """Return the code for the head."""
    lines = [f"value = {WIDEN[kernel.source].format(loaded='ahead')}"]
    if _checks(kernel):
        lines.append(f"head_exponents = {_exponents(kernel)}")
    if kernel.target is not None:
        *steps, stored = _narrow(kernel)
        lines += ["true = value * scale", *steps, f"tl.store(target - head + lane, {stored}, mask=in_head)"]
    if kernel.requested.squared_norm:
        lines.append(f"head_squares = tl.where(in_head, {_square(kernel)}, 0.0)")
    return lines


def _offsets(kernel: Kernel) -> str:
    """If one dtype is wider, each lane takes as many elements at a time as fit an access of that dtype.

    Otherwise lanes would take more of the narrower one, and exchange them through shared memory.
    """
    plain = f"start + tl.arange(0, {kernel.block})"
    if kernel.target is None or kernel.target.itemsize == kernel.source.itemsize:
        return plain
    return f"tl.max_contiguous({plain}, {ALIGNMENT // max(kernel.source.itemsize, kernel.target.itemsize)})"


def _address(name: str, cell: str, dtype: torch.dtype, access: Access) -> str:
    """The hint must follow the cast: the compiler ignores a hint on the integer."""
    start = f"(tl.load({cell}) + {dtype.itemsize} * head)" if access is Access.PEELED else f"tl.load({cell})"
    pointer = f"{start}.to(tl.pointer_type(tl.{CARRIER[dtype]}))"
    return f"{name} = {pointer if access is Access.NARROW else f'tl.multiple_of({pointer}, {ALIGNMENT})'} + first"


def _body(kernel: Kernel, masked: bool) -> list[str]:
    """Return the code for one block; if masked, elements outside the gradient count as zeros."""
    loaded = f"tl.load(source + offsets{', mask=inside, other=0' if masked else ''})"
    lines = ["inside = offsets < left"] if masked else []
    lines.append(f"value = {WIDEN[kernel.source].format(loaded=loaded)}")
    if _checks(kernel):
        lines.append(f"exponents = tl.maximum(exponents, {_exponents(kernel)})")
    if kernel.target is not None:
        *steps, stored = _narrow(kernel)
        lines += ["true = value * scale", *steps]
        lines.append(f"tl.store(target + offsets, {stored}{', mask=inside' if masked else ''})")
    if kernel.requested.squared_norm:
        # Outside the gradient "true" is 0 * scale, which is NaN if the scale is infinite.
        lines.append(f"squares += {f'tl.where(inside, {_square(kernel)}, 0.0)' if masked else _square(kernel)}")
    return lines


def _exponents(kernel: Kernel) -> str:
    return f"value.to(tl.int{_width(kernel)}, bitcast=True) & {_infinity(kernel)}"


def _square(kernel: Kernel) -> str:
    return "value * value" if kernel.target is None else "true * true"


def _narrow(kernel: Kernel) -> tuple[str, ...]:
    """Return the steps from "true" to the stored value; float64 becomes 16-bit through float32, as in torch."""
    assert kernel.target is not None
    if not _is_double(kernel):
        return NARROW[kernel.target]
    if kernel.target == torch.float64:
        return ("true",)
    return tuple(step.replace("true", "true.to(tl.float32)", 1) for step in NARROW[kernel.target])


def _results(kernel: Kernel) -> list[str]:
    """Return plain stores of constants: no atomics needed, and no dependence on the order of programs."""
    lines, peeled = [], kernel.access is Access.PEELED
    if _checks(kernel):
        largest = "tl.max(exponents, axis=0)"
        if peeled:
            largest = f"tl.maximum({largest}, tl.max(head_exponents, axis=0))"
        lines.append(f"if {largest} == {_infinity(kernel)}:  # all ones: inf or NaN")
    if kernel.requested.found_inf:
        lines.append("    tl.store(found_inf, 1.0)")
    if kernel.requested.flags:
        lines.append("    tl.store(flags + tl.load(row + 3), 1)")
    if kernel.requested.squared_norm:
        total = "(tl.sum(squares, axis=0) + tl.sum(head_squares, axis=0))" if peeled else "tl.sum(squares, axis=0)"
        lines.append(f"tl.store(partials + program, {total}.to(tl.float32))")
    return lines


def _checks(kernel: Kernel) -> bool:
    return kernel.requested.found_inf or kernel.requested.flags


def _is_double(kernel: Kernel) -> bool:
    return kernel.source == torch.float64


def _width(kernel: Kernel) -> int:
    return 64 if _is_double(kernel) else 32


def _infinity(kernel: Kernel) -> str:
    """Return the bits of infinity in the dtype of the arithmetic, which are also the mask of its exponent."""
    return "0x7FF0000000000000" if _is_double(kernel) else "0x7F800000"


def indented(lines: list[str], spaces: int) -> list[str]:
    return [" " * spaces + line for line in lines]
