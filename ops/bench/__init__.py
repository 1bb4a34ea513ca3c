"""`baton bench`: what durability, workers and sweeps cost, each beside its floor in the same run.

A benchmark, not a test: it starts a server and workers of its own on this machine, alternates between what it
measures and the floor, takes medians, and says where a bar is missed.
"""
