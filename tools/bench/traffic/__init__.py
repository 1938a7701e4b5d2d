"""Bytes of memory traffic: what ops, fxamp's kernels and compiled optimizer steps read and write.

    with counted_traffic() as traffic:
        scaler.step(optimizer)
    traffic.read + traffic.written

Every kernel is taken to go once through all of every tensor that it is given, and tensors of one element count nothing.
"""

from fxamp.tools.bench.traffic.counted import Traffic, counted_traffic
from fxamp.tools.bench.traffic.generated import generated_traffic

__all__ = ["Traffic", "counted_traffic", "generated_traffic"]
