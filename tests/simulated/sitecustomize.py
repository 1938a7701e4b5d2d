"""Python imports this when it starts, in every process that a test run under a simulated CPU starts."""

import simulated_cpu

simulated_cpu.simulate()
