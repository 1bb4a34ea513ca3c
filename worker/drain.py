"""Letting go of tasks because this process is to end: asked for once, by a signal, and bound by a time.

asked      take nothing new; end each task's attempt at its next safe point (before a model call, between two calls
           of tools), with everything saved
overdue    the grace is almost over: a model call that still runs is abandoned. A tool is not: it is waited for
           until the process ends, and then left to reconcile
"""

from __future__ import annotations

import time

from worker.errors import DrainRequested

MARGIN = 0.2  # of the grace: for saving, handing over, and RQ's own farewell
MARGIN_MAX_S = 3.0
PATIENCE = 0.6  # of that


class Drain:
    """One per process. `monotonic` seconds throughout."""

    def __init__(self) -> None:
        self.why = ""
        self.asked = False  # no Event: a signal handler must not wait for a lock its own thread holds
        self._abandon_at = self._ends_at = float("inf")

    def ask(self, why: str, grace_s: float) -> None:
        """Begin to drain; asking again changes nothing. May be called in a signal handler."""
        if not self.asked:
            now = time.monotonic()
            self._ends_at = now + grace_s
            self._abandon_at = self._ends_at - min(grace_s * MARGIN, MARGIN_MAX_S)
            self.why = why
            self.asked = True

    @property
    def overdue(self) -> bool:
        return time.monotonic() >= self._abandon_at

    def leave(self, *, abandoning: bool = False) -> None:
        """Raise DrainRequested where the task can be let go of as it stands; `abandoning`: only once that is overdue,
        for it costs a model call."""
        if self.asked and (self.overdue or not abandoning):
            raise DrainRequested(self.why, abandoned=abandoning)

    def left_s(self) -> float:
        """Until what still runs is abandoned; infinite before anybody asked."""
        return self._abandon_at - time.monotonic()

    def patience_s(self) -> float:
        """Until a work-horse that has still not let go is ended; what is abandoned needs a moment to notice."""
        return self.left_s() + (self._ends_at - self._abandon_at) * PATIENCE if self.asked else float("inf")

    def ends_in_s(self) -> float:
        """Until this process has to be gone; infinite before anybody asked."""
        return self._ends_at - time.monotonic()


PROCESS = Drain()
"""This process's own. A fork starts with its parent's: see `begin_anew`."""


def begin_anew() -> None:
    """For a process that was just forked."""
    PROCESS.__init__()  # type: ignore[misc]  # in place: others have imported the name
