"""What the floor runs: a plain RQ job that does nothing."""

from __future__ import annotations


def noop(name: str, number: int) -> None:
    """Two arguments, as a delivery of ours has."""
