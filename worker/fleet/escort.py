"""Sees a worker and its work-horse out, from a thread of its own: RQ's waits for the horse, for as long as it takes.

drain    the horse is told to let go of its task; when it has not by the end of its patience it is killed, and its
         parent, which reaps it, hands the task over, unless a sweeper is faster: so it is said beforehand that a death
         is none of the task's; at the end of the grace the process ends, whatever it waits for
stop     the task's cancel is asked for and the horse told to look; if it has not left a moment later, it is killed
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import redis

from worker.dispatch import STOPPED_BY, open_store, parts_of
from worker.drain import PROCESS
from worker.errors import BatonError
from worker.log import event
from worker.process import is_child
from worker.settings import Settings
from worker.state.views import Views

log = logging.getLogger(__name__)

TICK_S = 0.05
ASK_S = 0.2
STOP_PATIENCE_S = 3.0


class Escort:
    """`horse`: its pid, 0 for none; `job`: which one it runs. `tell`: says in Redis that this worker drains."""

    def __init__(
        self, settings: Settings, horse: Callable[[], int], job: Callable[[], str], tell: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._horse = horse
        self._job = job
        self._tell = tell
        self._ear, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        self.drained = 0  # pid of the horse that was killed so that this process can end

    def start(self) -> None:
        threading.Thread(target=self._wait, name="escort", daemon=True).start()

    def wake(self) -> None:
        """This process drains. May be called in a signal handler."""
        with suppress(OSError):
            os.write(self._bell, b"!")

    def stop(self, job: str, horse: int) -> None:
        """Somebody stopped this job in RQ."""
        threading.Thread(target=self._stop, args=(job, horse), name="stop", daemon=True).start()

    def _wait(self) -> None:
        os.read(self._ear, 1)
        event(log, "drains", why=PROCESS.why, grace_s=self._settings.drain_grace_s)
        for say in (self._say_so, self._expect_end):  # Redis may not answer
            threading.Thread(target=say, name="drain-note", daemon=True).start()
        told = 0
        while PROCESS.ends_in_s() > 0:
            horse = self._horse()
            if horse and horse != told:
                told = horse
                _send(horse, signal.SIGTERM)
            if horse and PROCESS.patience_s() <= 0 and self.drained != horse:
                self.drained = horse
                event(log, "horse-ended", level=logging.WARNING, pid=horse, why="it did not let go in time")
                _kill(horse)
            time.sleep(TICK_S)
        event(log, "grace-over", level=logging.WARNING, why="something here still waits, for Redis perhaps")
        os._exit(1)

    def _say_so(self) -> None:
        try:
            self._tell()
        except Exception as error:
            event(log, "drain-not-shown", why=error)

    def _expect_end(self) -> None:
        """Of the horse, as soon as it holds its task."""
        expected = 0
        while PROCESS.ends_in_s() > 0:
            horse = self._horse()
            if horse and horse != expected:
                with suppress(BatonError, redis.RedisError, OSError):  # then it may be counted as a crash
                    expected = horse if self._expected(horse, self._job()) else 0
            time.sleep(ASK_S)

    def _expected(self, horse: int, job: str) -> bool:
        store = open_store(self._settings)
        try:
            running = Views(store.client, store.keys).holder_of(parts_of(job)[0])
            if running is None or not is_child(running.owner, horse):
                return False
            store.expect_end(running.task_id, running.fence)
            return True
        finally:
            store.client.close()

    def _stop(self, job: str, horse: int) -> None:
        try:
            self._ask_for_cancel(job)
        except (BatonError, redis.RedisError, OSError) as error:
            event(log, "cancel-failed", level=logging.WARNING, job=job, why=error)
        else:
            _send(horse, signal.SIGUSR1)
            until = time.monotonic() + min(STOP_PATIENCE_S, self._settings.drain_grace_s)
            while self._horse() == horse and time.monotonic() < until:
                time.sleep(TICK_S)
        if self._horse() == horse:
            event(log, "horse-ended", level=logging.WARNING, pid=horse, why=STOPPED_BY)
            _kill(horse)

    def _ask_for_cancel(self, job: str) -> None:
        store, (task_id, delivery) = open_store(self._settings), parts_of(job)
        try:
            if Views(store.client, store.keys).task(task_id).delivery == delivery:
                store.cancel(task_id, by=STOPPED_BY)
        finally:
            store.client.close()


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill(horse: int) -> None:
    """It and its process group, in which it is alone with what its tools have started."""
    _send(horse, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(horse, signal.SIGKILL)
