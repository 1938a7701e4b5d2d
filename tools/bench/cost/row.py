"""A counted way of training in the numbers of a table, which extrapolate over layers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fxamp.tools.bench.cost.count import PRODUCTS, Count
from fxamp.tools.bench.cost.rates import Rates


@dataclass(frozen=True)
class Row:
    """One way of training. Bytes of each stage; ``beside_products``: those of all kernels that are not products.

    ``triton``, ``library``, ``outside``: launches of Triton kernels, of other kernels of the forward and the backward,
    and of the step. ``peak``: most bytes at once; ``gradients``: most bytes that a backward returns. ``syncs``: how
    often the host waits. ``forward_beside``, ``forward_flops``: the forward's share of ``beside_products`` and
    ``flops``. ``sent``, ``taken``: bytes to the host's memory and back.
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
    forward_beside: float = 0.0
    sent: float = 0.0
    taken: float = 0.0
    forward_flops: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        return self.forward + self.backward + self.step

    def milliseconds(self, rates: Rates) -> float:
        """An estimate: products by their FLOPs, all other kernels by their bytes; nothing waits, nothing overlaps.

        Copies to the host's memory add only the time by which they outlast the forward, copies back the backward.
        """
        products, of_forward = (
            sum(flops / rates.of(dtype) for dtype, flops in by_dtype.items())
            for by_dtype in (self.flops, self.forward_flops)
        )
        seconds = self.beside_products / rates.bandwidth + products
        forward = self.forward_beside / rates.bandwidth + of_forward
        backward = seconds - forward - self.step / rates.bandwidth
        waits = max(0.0, self.sent / rates.host - forward) + max(0.0, self.taken / rates.host - backward)
        return 1e3 * (seconds + waits)

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
        forward_beside=sum(k.bytes for k in inside if k.stage == "forward" and k.kind not in PRODUCTS),
        sent=count.copied("forward"),
        taken=count.copied("backward"),
        forward_flops=count.forward_flops,
    )


def extrapolated(layers: Sequence[int], rows: Sequence[Row], to: int) -> Row:
    """What the first and the last of ``rows``, counted for these ``layers``, say about a model of ``to`` layers."""
    first, last = rows[0], rows[-1]
    share = (to - layers[0]) / (layers[-1] - layers[0])
    numbers = {
        name: getattr(first, name) + share * (getattr(last, name) - getattr(first, name))
        for name in (own.name for own in fields(Row) if own.type is float)
    }
    flops = _further(first.flops, last.flops, share)
    forward = _further(first.forward_flops, last.forward_flops, share)
    numbers["peak"] = max(numbers["peak"], numbers["gradients"])  # with more layers, the peak may move to the end
    return Row(first.label, first.policy, **numbers, flops=flops, forward_flops=forward, graphs=last.graphs)


def _further(first: Mapping[str, float], last: Mapping[str, float], share: float) -> dict[str, float]:
    return {key: first.get(key, 0) + share * (last.get(key, 0) - first.get(key, 0)) for key in {**first, **last}}
