"""fxamp-policy: list, check, show, explain, calibrate and bisect policies; most of it without torch."""
