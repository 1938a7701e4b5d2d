"""fxamp-bench step: compile time and time of AdamW's step: fxamp.compile_optimizer beside torch's own.

setup, contenders   which parameters there are, and who steps them
worker             one contender in a process of its own
measure, table     compile each with fresh caches, then step them in turn
command            what is asked for
"""
