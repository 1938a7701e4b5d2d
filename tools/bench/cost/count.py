"""The counts of a training step: plain values, which JSON can hold."""

from dataclasses import dataclass, field, replace

#: Kinds of kernels that multiply: their time is that of their FLOPs, not of their bytes.
PRODUCTS = ("matmul", "convolution", "attention")

#: The kind of copies to the host's memory and back, of values that are saved there for the backward.
HOST_COPY = "host copy"

#: The name of ops whose result the host waits for.
WAITED_FOR = ("_local_scalar_dense", "nonzero", "copy to the host")


@dataclass(frozen=True)
class Access:
    """One buffer that a kernel reads or writes, once: ``bytes`` of ``dtype``."""

    buffer: str
    bytes: int
    dtype: str


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step, or several launches of the same work.

    ``stage``: "forward", "backward" or "step". ``kind``: "triton", one of :data:`PRODUCTS`, "fxamp" (its gradient
    kernels), :data:`HOST_COPY`, "library" (any other of a graph), "eager" (outside of the graphs), "zeros" (gradients
    of unused results), "by hand" (not captured, but known). ``ops``: what it computes. ``sources``: ``file:line`` of
    the program.
    A copy to or from the host reads or writes the GPU's memory alone.
    """

    stage: str
    kind: str
    ops: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    sources: tuple[str, ...] = ()
    launches: int = 1

    @property
    def bytes(self) -> int:
        return sum(access.bytes for access in (*self.reads, *self.writes))


@dataclass(frozen=True)
class Buffer:
    """Memory that the forward keeps for the backward, or that is in use at the peak.

    ``source``: ``file:line`` of the program. ``kind``: "kept" (for the backward), "result", "gradient" (a result of the
    backward), "temporary". ``stage``: the one that makes it.
    """

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    op: str
    module: str
    source: str
    kind: str = "kept"
    stage: str = "forward"


@dataclass(frozen=True)
class Peak:
    """The moment at which most bytes are in use: while kernel ``kernel`` of the ``kernels`` of a graph runs.

    ``stage``: of that graph. ``ops``, ``module``, ``source``: of the kernel. ``buffers``: all memory in use, the
    largest first; together ``bytes``.
    """

    bytes: int = 0
    stage: str = ""
    kernel: int = 0
    kernels: int = 0
    ops: str = ""
    module: str = ""
    source: str = ""
    buffers: tuple[Buffer, ...] = ()

    def largest(self, most: int) -> "Peak":
        """The same peak with the ``most`` largest buffers alone."""
        return replace(self, buffers=self.buffers[:most])


@dataclass
class Count:
    """One way of training, counted.

    ``flops``: of products, by the dtype of their first operand; ``forward_flops``: those of forwards. ``kept``: the
    storages that forwards save for the backward, without inputs. ``graphs``: compiled ones. ``peak``: the moment with
    most bytes of activations, gradients and temporaries. ``gradients``: most bytes that a backward returns.
    """

    kernels: list[Kernel] = field(default_factory=list)
    flops: dict[str, int] = field(default_factory=dict)
    forward_flops: dict[str, int] = field(default_factory=dict)
    kept: list[Buffer] = field(default_factory=list)
    graphs: int = 0
    peak: Peak = Peak()
    gradients: int = 0

    def bytes(self, stage: str) -> int:
        """Bytes that the kernels of ``stage`` move."""
        return sum(kernel.bytes for kernel in self.kernels if kernel.stage == stage)

    def copied(self, stage: str) -> int:
        """Bytes that go to the host's memory in the forward, and come back in the backward."""
        return sum(kernel.bytes for kernel in self.kernels if kernel.stage == stage and kernel.kind == HOST_COPY)

    @property
    def kept_bytes(self) -> int:
        return sum(value.bytes for value in self.kept)

    @property
    def syncs(self) -> int:
        """How often the host waits for the device."""
        return sum(kernel.launches for kernel in self.kernels if any(op in kernel.ops for op in WAITED_FOR))
