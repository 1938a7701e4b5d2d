"""Run the passes in order: verify, time and record each, in one place; and the protocol of who adds some."""

from fxamp.pipeline.run import cast_graph, run_passes, run_traced
