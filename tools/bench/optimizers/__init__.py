"""fxamp-bench optimizers: every optimizer under fxamp.GradScaler(skip="device"), compared with torch.

optimizers, users_own   which there are, and what they are given
scenario, training      what they are trained through
agreement               equal, within rounding, or neither
host_syncs              what waits for the device
measure, result         one row
command, table          what is asked for, what is printed
"""
