"""Python imports this when it starts, in every process that a test run under a pretended CPU starts."""

import pretended_cpu

pretended_cpu.pretend()
