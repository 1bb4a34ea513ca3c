"""Time comes in from outside, so that no test sleeps to make it pass.

Three kinds of time: the holder's own monotonic seconds (for its lease bound), the Redis server's
wall clock in milliseconds (for everything that is stored), and waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol


class Clock(Protocol):
    """What Baton asks about time."""

    def monotonic(self) -> float:
        """Seconds that never go back, of this process only."""
        ...

    def server_ms(self, reply: Sequence[bytes | int]) -> int:
        """Milliseconds since 1970 from the server's answer to TIME: [seconds, microseconds]."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""
        ...


class SystemClock:
    """The real thing."""

    def monotonic(self) -> float:
        return time.monotonic()

    def server_ms(self, reply: Sequence[bytes | int]) -> int:
        return int(reply[0]) * 1000 + int(reply[1]) // 1000

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class ManualClock:
    """Time that moves only when told to; `sleep` moves it. Shipped for tests and models of the protocol."""

    def __init__(self, start_ms: int = 1_800_000_000_000) -> None:
        self._ms = float(start_ms)
        self._lock = threading.Lock()

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._ms += seconds * 1000

    def monotonic(self) -> float:
        return self._ms / 1000

    def server_ms(self, reply: Sequence[bytes | int]) -> int:
        return int(self._ms)

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)
