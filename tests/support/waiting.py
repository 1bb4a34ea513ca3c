"""Wait for conditions, never for time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T | None], awaited: str, *, timeout: float = 60, poll_s: float = 0.02) -> T:
    """The first true value of `predicate`; AssertionError that names what was awaited, and what was seen last."""
    deadline = time.monotonic() + timeout
    while True:
        seen = predicate()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s for {awaited}; last seen: {seen!r}")
        time.sleep(poll_s)
