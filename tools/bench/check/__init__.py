"""fxamp-bench check: does fxamp compute the right numbers on this machine?"""
