"""Threads that wait for work: made when there is more work than idle ones, gone when they were idle for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

IDLE_MAX_S = 30.0
STACK_BYTES = 1 << 20  # of address space; memory is what a thread has really touched of it


class Crew:
    """`run` never waits: whoever calls it sees to it that there is not too much work at once."""

    def __init__(self) -> None:
        threading.stack_size(STACK_BYTES)
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = self._all = 0

    @property
    def busy(self) -> int:
        with self._lock:
            return self._all - self._idle

    def run(self, work: Callable[[], None]) -> None:
        """`work` raises nothing."""
        with self._lock:
            waiting = self._idle > 0
            if waiting:
                self._idle -= 1  # it is promised this one
            else:
                self._all += 1
        if waiting:
            self._work.put(work)
        else:
            threading.Thread(target=self._live, args=(work,), name="task", daemon=True).start()

    def _live(self, work: Callable[[], None] | None) -> None:
        while work is not None:
            work()
            del work  # it holds on to a whole conversation
            with self._lock:
                self._idle += 1
            work = self._next()

    def _next(self) -> Callable[[], None] | None:
        while True:
            try:
                return self._work.get(timeout=IDLE_MAX_S)
            except Empty:
                with self._lock:
                    if self._idle > 0:  # else every idle one was promised some: it is on its way
                        self._idle -= 1
                        self._all -= 1
                        return None
