"""fxamp-bench check: does fxamp compute what it should on this machine?"""
