"""Bytes of memory traffic that ops, fxamp's kernels and compiled optimizer steps read and write.

    with counted_traffic() as traffic:
        scaler.step(optimizer)
    traffic.read + traffic.written

Every kernel is assumed to go once through each of its tensors; tensors of one element do not count.
"""

from fxamp.tools.bench.traffic.counted import Traffic, counted_traffic
from fxamp.tools.bench.traffic.generated import generated_traffic

__all__ = ["Traffic", "counted_traffic", "generated_traffic"]
