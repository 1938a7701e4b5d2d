"""Run the passes in order: verify, time and record each, in one place."""

from fxamp.pipeline.run import run_passes

__all__ = ["run_passes"]
