"""Run the passes in order: verify, time and record each, in one place."""

from fxamp.pipeline.record import GraphRecord, PassRecord
from fxamp.pipeline.run import run_passes

__all__ = ["GraphRecord", "PassRecord", "run_passes"]
