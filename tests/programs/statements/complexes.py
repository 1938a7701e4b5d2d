"""Complex numbers, which no autocast casts."""

import torch
from programs.draft import Draft
from programs.statements.registry import statement

_MADE = (
    "torch.complex({}.float(), {}.float())", "torch.polar({}.float().abs(), {}.float())",
    "torch.view_as_complex(torch.stack([{}.float(), {}.float()], -1))",
    "{}.float().to(torch.complex64) * 1j + {}.float()", "torch.fft.fft({}.float() + {}.float())",
)  # fmt: skip

_REAL = (
    "{}.abs()", "torch.view_as_real({})", "{}.real + {}.imag", "({} * {}.conj()).real", "{}.angle()", "{}.exp().real",
    "torch.fft.ifft({}).real", "({} / ({}.abs() + 1)).imag", "{}.sum(-1).abs()",
)  # fmt: skip


@statement()
def complex_values(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 1)
    z = d.let(d.pick(_MADE).format(x, d.alike(x)))
    d.let(d.pick(_REAL).replace("{}", z))


@statement()
def complex_product(d: Draft) -> None:
    """A complex product next to one that autocast lowers."""
    x = d.ranked(2)
    w = d.parameter(d.shape(x)[-1], d.pick((8, 4)))
    z = d.let(f"torch.complex({x}.float(), {x}.float()) @ {w}.to(torch.complex64)")
    d.let(d.pick(("{}.abs()", "{}.real", "({} @ {}.mH).real", "{}.mean(0).imag")).replace("{}", z))


@statement()
def complex_parameter(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 1)
    size = d.shape(x)[-1]
    vector = d.pick((True, False))
    w = d.parameter(*((size,) if vector else (size, d.pick((8, 4)))), dtype=torch.complex64)
    z = d.let(f"torch.complex({x}.float(), {d.alike(x)}.float()) {'*' if vector else '@'} {w}{d.pick(('', '.conj()'))}")
    d.let(d.pick(_REAL).replace("{}", z))


@statement()
def spectrum(d: Draft) -> None:
    x = d.value(lambda v: v.dim() >= 1 and v.shape[-1] > 1)
    code = "torch.fft.irfft(torch.fft.rfft({0}.float()) * {1}.to(torch.complex64), n={2})"
    size = d.shape(x)[-1]
    d.let(code.format(x, d.parameter(size // 2 + 1), size))
