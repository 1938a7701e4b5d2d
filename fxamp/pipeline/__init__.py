"""Run the passes in order: verify, time and record each, in one place; and the protocol of participants."""

from fxamp.pipeline.run import cast_graph, run_passes, run_traced
