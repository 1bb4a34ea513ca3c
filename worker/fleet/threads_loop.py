"""The course of a `ThreadWorker`: take jobs while there is room and nobody says otherwise, until it is to end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis
from rq.suspension import is_suspended

from worker import drain
from worker.fleet.threads_books import Books
from worker.fleet.threads_intake import Intake
from worker.fleet.threads_tasks import Tasks, reserve_s
from worker.heartbeat import Line
from worker.log import event
from worker.state.transact import PASSING, error_code

if TYPE_CHECKING:
    from worker.fleet.thread import ThreadWorker

log = logging.getLogger(__name__)

POP_S = 1  # a pop that waits looks up so often, so that a drain waits no longer for it
LOOK_S = 0.5  # between two looks at what `rq suspend` and `baton workers quiet` have said
AWAY_S, AWAY_MAX_S = 0.2, 5.0
FAREWELL_S = 0.7  # of the grace, for what RQ is told at the end
EXIT_S = 0.2  # of that, for the end itself


@dataclass(frozen=True)
class Limits:
    """When to end unasked; as `rq worker` has them."""

    burst: bool = False
    max_jobs: int | None = None
    max_idle_s: int | None = None

    @property
    def any(self) -> bool:
        return self.burst or self.max_jobs is not None or self.max_idle_s is not None


class Loop:
    """One run of the worker. `wake` may be called in a signal handler."""

    def __init__(self, worker: ThreadWorker, limits: Limits) -> None:
        self.worker = worker
        self.settings = worker.settings
        self.limits = limits
        self.taken = 0
        self.code = 0
        self.books = Books(worker)
        self.tasks = Tasks(self.settings, self.books, worker.make_model, self._task_over)
        self._intake = Intake(worker)
        self._thread = threading.Thread(target=self._take_in, name="intake", daemon=True)
        self._taking = True
        self._line = Line(worker.connection)
        self._gone_at = float("inf")
        self._looked_at = 0.0
        self._held_up = ""

    # -- told to end -------------------------------------------------------------------------------------------

    def ask(self, why: str) -> None:
        """Begin to drain, or go on draining. May be called in a signal handler."""
        if not drain.PROCESS.asked:
            grace = self.settings.drain_grace_s
            self._gone_at = time.monotonic() + grace
            # So many hand-overs take a while; they have to begin so much earlier.
            reserved = self._farewell_s + reserve_s(len(self.tasks.running))
            drain.PROCESS.ask(why, grace - min(grace / 2, reserved))
        self._line.ring()

    def _fail(self, why: str) -> None:
        event(log, "worker-failed", level=logging.ERROR, why=why)
        self.code = 1
        self.ask(why)

    def _task_over(self) -> None:
        if drain.PROCESS.asked or not self._taking:
            self._line.ring()

    # -- the main thread ---------------------------------------------------------------------------------------

    def run(self) -> None:
        with self.tasks:
            self.books.start()
            self._thread.start()
            while not drain.PROCESS.asked and (self._taking or self.tasks.running):
                self._line.rest(1.0)
                if not (self.tasks.alive and self.books.alive):
                    self._fail("a thread of this worker has ended")
            if drain.PROCESS.asked:
                self._let_go()
        self._farewell()

    @property
    def left_running(self) -> bool:
        """Threads would keep this process from ending, or would go on until it has."""
        others = [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
        return bool(self.tasks.busy or self._thread.is_alive() or others)

    def _let_go(self) -> None:
        event(log, "drains", why=drain.PROCESS.why, tasks=len(self.tasks.running), grace_s=self.settings.drain_grace_s)
        self._apart("drain-note", self.worker.set_shutdown_requested_date, 0)
        while (self.tasks.running or self._thread.is_alive()) and (left := drain.PROCESS.patience_s()) > 0:
            # The pop that goes on looks up within POP_S.
            self._line.rest(left if self.tasks.running else min(left, 0.02))
        if self.tasks.running:
            self._apart("hand-over", lambda: self.tasks.hand_over_rest(drain.PROCESS.why), self._left_s())

    @property
    def _farewell_s(self) -> float:
        return min(FAREWELL_S, self.settings.drain_grace_s / 8)

    def _left_s(self) -> float:
        """For what is still to be done, but for the farewell."""
        return self._gone_at - time.monotonic() - self._farewell_s

    def _farewell(self) -> None:
        """Redis may be away, and then nobody is told."""
        if self._gone_at == float("inf"):
            self._gone_at = time.monotonic() + self.settings.drain_grace_s
        self.books.settle(time.monotonic() + self._left_s())
        self._apart("farewell", self.worker.teardown, self._gone_at - time.monotonic() - EXIT_S)
        self.books.stop()

    def _apart(self, name: str, act: Callable[[], Any], wait_s: float) -> None:
        """In a thread of its own, which is waited for no longer than that."""

        def try_it() -> None:
            try:
                act()
            except Exception as error:
                event(log, f"{name}-failed", level=logging.WARNING, why=error)

        thread = threading.Thread(target=try_it, name=name, daemon=True)
        thread.start()
        thread.join(max(0.0, wait_s))

    # -- the intake's thread -----------------------------------------------------------------------------------

    def _take_in(self) -> None:
        try:
            self._take_while_wanted()
        except BaseException as error:
            self._fail(f"the intake has failed: {error!r}")
        finally:
            self._taking = False
            self._line.ring()

    def _take_while_wanted(self) -> None:
        away_s, idle_since = AWAY_S, time.monotonic()
        while not drain.PROCESS.asked:
            room = self.tasks.await_room(POP_S)
            if not room:
                continue
            try:
                found = self._take(room)
            except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError) as error:
                if isinstance(error, redis.ResponseError) and error_code(error) not in PASSING:
                    raise
                event(log, "takes-nothing", level=logging.WARNING, why=error, again_in_s=round(away_s, 1))
                self._pause(away_s)
                away_s = min(away_s * 2, AWAY_MAX_S)
                continue
            away_s = AWAY_S
            self.taken += found
            if found or self.tasks.running:
                idle_since = time.monotonic()
            if self._enough(idle_since, found):
                return

    def _take(self, room: int) -> int:
        """How many tasks were begun."""
        if self.worker.should_run_maintenance_tasks:
            self.worker.run_maintenance_tasks()
        if self._is_held_up(LOOK_S):
            self._pause(LOOK_S)
            return 0
        if self.limits.max_jobs is not None:
            room = min(room, self.limits.max_jobs - self.taken)
        began = time.monotonic()
        taken = self._intake.take(room, None if self.limits.burst else POP_S)
        if not taken:
            return 0
        waited = time.monotonic() - began > LOOK_S / 10
        if drain.PROCESS.asked or (waited and self._is_held_up(0)):
            self._intake.put_back(taken)
            return 0
        for one in taken:
            self.tasks.launch(one)
        return len(taken)

    def _is_held_up(self, look_s: float) -> bool:
        """Somebody said that no more are to be taken; it is looked at again after `look_s`."""
        if time.monotonic() < self._looked_at + look_s:
            return bool(self._held_up)
        self._looked_at = time.monotonic()
        suspended = is_suspended(self.worker.connection, self.worker)
        found = "rq suspend" if suspended else "baton workers quiet" if self.worker.told_to_be_quiet() else ""
        if found != self._held_up:
            event(log, "quiet" if found else "resumed-work", worker=self.worker.name, why=found or self._held_up)
            self._held_up = found
            self.books.suspend(bool(found))
        return bool(found)

    def _enough(self, idle_since: float, found: int) -> bool:
        limits = self.limits
        if limits.max_jobs is not None and self.taken >= limits.max_jobs:
            return True
        if limits.burst and not found:
            if not self.tasks.running or self._held_up:
                return True
            self._pause(0.05)  # what runs may be handed over, and be queued again
        return limits.max_idle_s is not None and time.monotonic() - idle_since >= limits.max_idle_s

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not drain.PROCESS.asked:
            time.sleep(min(left, 0.1))
