"""A counted way of training in the numbers of a table, which extrapolate over layers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fxamp.dtypes import DTYPES
from fxamp.tools.bench.cost.count import PRODUCTS, Count


@dataclass(frozen=True)
class Rates:
    """What a GPU does in a second: bytes of memory, and FLOPs of products in 16 bits and in float32."""

    bandwidth: float = 3.0e12
    flops16: float = 600e12
    flops32: float = 50e12

    def of(self, dtype: str) -> float:
        """FLOPs of products of ``dtype`` in a second; float8 at twice 16 bits', float4 at four times.

        On a B200: 2.25, 4.5 and 9 PFLOPS, dense (NVIDIA's data sheet).
        """
        for bits, times in (("float8", 2), ("float4", 4)):
            if dtype.startswith(bits):
                return times * self.flops16
        return self.flops16 if dtype in DTYPES else self.flops32


@dataclass(frozen=True)
class Row:
    """One way of training. Bytes of each stage; ``beside_products``: those of all kernels that are no products.

    ``triton``, ``library``, ``outside``: launches of Triton kernels, of other kernels of the forward and the backward,
    and of the step. ``peak``: most bytes at once; ``gradients``: most bytes that a backward hands out. ``syncs``: how
    often the host waits.
    """

    label: str
    policy: str
    forward: float
    backward: float
    step: float
    beside_products: float
    triton: float
    library: float
    outside: float
    flops: Mapping[str, float]
    kept: float
    graphs: int
    peak: float
    gradients: float
    syncs: float

    @property
    def bytes(self) -> float:
        return self.forward + self.backward + self.step

    def milliseconds(self, rates: Rates) -> float:
        """An estimate: products by their FLOPs, all other kernels by their bytes; nothing overlaps, nothing waits."""
        seconds = self.beside_products / rates.bandwidth
        return 1e3 * (seconds + sum(flops / rates.of(dtype) for dtype, flops in self.flops.items()))

    def as_dict(self, rates: Rates) -> dict[str, Any]:
        return asdict(self) | {"bytes": self.bytes, "estimated_milliseconds": self.milliseconds(rates)}


def row(label: str, policy: str, count: Count) -> Row:
    """The numbers of ``count``."""
    inside = [kernel for kernel in count.kernels if kernel.stage != "step"]
    triton = sum(kernel.launches for kernel in inside if kernel.kind == "triton")
    return Row(
        label,
        policy,
        forward=count.bytes("forward"),
        backward=count.bytes("backward"),
        step=count.bytes("step"),
        beside_products=sum(kernel.bytes for kernel in count.kernels if kernel.kind not in PRODUCTS),
        triton=triton,
        library=sum(kernel.launches for kernel in inside) - triton,
        outside=sum(kernel.launches for kernel in count.kernels if kernel.stage == "step"),
        flops=count.flops,
        kept=count.kept_bytes,
        graphs=count.graphs,
        peak=count.peak.bytes,
        gradients=count.gradients,
        syncs=count.syncs,
    )


def extrapolated(layers: Sequence[int], rows: Sequence[Row], to: int) -> Row:
    """What the first and the last of ``rows``, counted for so many ``layers``, say of a model of ``to`` layers."""
    first, last = rows[0], rows[-1]
    share = (to - layers[0]) / (layers[-1] - layers[0])
    numbers = {
        name: getattr(first, name) + share * (getattr(last, name) - getattr(first, name))
        for name in (field.name for field in fields(Row) if field.type is float)
    }
    dtypes = {**first.flops, **last.flops}
    flops = {d: first.flops.get(d, 0) + share * (last.flops.get(d, 0) - first.flops.get(d, 0)) for d in dtypes}
    numbers["peak"] = max(numbers["peak"], numbers["gradients"])  # with more layers, the peak may move to the end
    return Row(first.label, first.policy, **numbers, flops=flops, graphs=last.graphs)
