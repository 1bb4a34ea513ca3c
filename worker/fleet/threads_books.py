"""RQ's books of a worker that runs many jobs at once: what `rq info`, rq-dashboard and RQ's own cleaners look at.

Everything is written by one thread, which takes whatever has begun or ended meanwhile and writes it in one
transaction; so a busy worker pays one round trip for many jobs, and no task waits for it. Nothing of Baton's own
state rests on it. After a lost reply a batch is written again: an end may be counted twice then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

import redis
from rq import worker_registration
from rq.worker import BaseWorker, WorkerStatus

from worker.fleet.threads_entries import Ended, Entries, Run
from worker.log import event
from worker.state.transact import PASSING, error_code

log = logging.getLogger(__name__)

BATCH_MAX = 64
RETRY_S, RETRY_MAX_S = 0.1, 2.0
BEATS_MAX = 100  # executions whose sign of life is given in one transaction


class Books:
    """`started` and `ended` may be called by any thread, and never wait. Of a run's ends the first one counts."""

    def __init__(self, worker: BaseWorker) -> None:
        self._worker = worker
        self._connection: Any = worker.connection
        self._entries = Entries(worker)
        self._told: SimpleQueue[tuple[Run, Ended | None] | threading.Event] = SimpleQueue()
        self._open: dict[Run, None] = {}  # in the books, and not ended there
        self._lock = threading.Lock()
        self._state = ""
        self._suspended = False
        self._thread = threading.Thread(target=self._write_for_ever, name="books", daemon=True)
        self._over = False
        self._beat_at = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def started(self, run: Run) -> None:
        self._told.put((run, None))

    def ended(self, run: Run, how: Ended) -> None:
        with self._lock:
            if run.closed:
                return
            run.closed = True
        self._told.put((run, how))

    def suspend(self, suspended: bool) -> None:
        """No more jobs are taken, or they are again."""
        self._suspended, self._state = suspended, ""
        self._told.put(threading.Event())

    def settle(self, until: float) -> bool:
        """Wait until all that was told so far is written, until that monotonic time at most."""
        written = threading.Event()
        self._told.put(written)
        return written.wait(max(0.0, until - time.monotonic()))

    def stop(self) -> None:
        self._over = True
        self._told.put(threading.Event())

    # -- the thread ------------------------------------------------------------------------------------------------

    def _write_for_ever(self) -> None:
        period_s = min(30.0, float(self._worker.job_monitoring_interval))
        while not self._over:
            batch, waiting = self._next(max(0.0, self._beat_at + period_s - time.monotonic()))
            if batch or not self._state:
                self._insist(batch)
            for one in waiting:
                one.set()
            if time.monotonic() >= self._beat_at + period_s:
                self._beat_at = time.monotonic()
                self._beat_patiently()

    def _next(self, wait_s: float) -> tuple[list[tuple[Run, Ended | None]], list[threading.Event]]:
        batch: list[tuple[Run, Ended | None]] = []
        waiting: list[threading.Event] = []
        try:
            entry = self._told.get(timeout=wait_s)
            while True:
                if isinstance(entry, threading.Event):
                    waiting.append(entry)
                else:
                    batch.append(entry)
                if len(batch) == BATCH_MAX:
                    break
                entry = self._told.get_nowait()
        except Empty:
            pass
        return batch, waiting

    def _insist(self, batch: Sequence[tuple[Run, Ended | None]]) -> None:
        """Write it, however long Redis is away. What it refuses for good is dropped: nothing rests on it."""
        pause = RETRY_S
        while not self._over:
            try:
                self._write(batch)
            except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError) as error:
                passing = not isinstance(error, redis.ResponseError) or error_code(error) in PASSING
                event(log, "books-not-written", level=logging.WARNING, entries=len(batch), why=error)
                if passing:
                    time.sleep(pause)
                    pause = min(pause * 2, RETRY_MAX_S)
                elif len(batch) > 1:
                    for one in batch:
                        self._insist([one])
                    return
                else:
                    return
            else:
                return

    def _write(self, batch: Sequence[tuple[Run, Ended | None]]) -> None:
        ends = {run: how for run, how in batch if how is not None}
        begun = [run for run, how in batch if how is None]
        open_after = {**self._open, **dict.fromkeys(begun)}
        for run in ends:
            open_after.pop(run, None)
        with self._connection.pipeline() as pipe:
            self._entries.starts(pipe, begun, ends.keys())
            self._entries.ends(pipe, ends)
            nothing = WorkerStatus.SUSPENDED if self._suspended else WorkerStatus.IDLE
            state = WorkerStatus.BUSY if open_after else nothing
            if state != self._state:
                self._worker.set_state(state, pipeline=pipe)
            pipe.execute()
        self._state, self._open = state, open_after

    # -- signs of life ---------------------------------------------------------------------------------------------

    def _beat_patiently(self) -> None:
        try:
            self._beat()
        except redis.RedisError as error:  # there is a next time
            event(log, "rq-heartbeat-failed", level=logging.WARNING, why=error)

    def _beat(self) -> None:
        worker = self._worker
        with self._connection.pipeline() as pipe:
            worker.heartbeat(pipeline=pipe)
            if pipe.execute()[0]:  # a field that was not there: Redis has forgotten us
                pipe.hset(worker.key, mapping={**worker.serialize(), "state": self._state})
                worker_registration.register(worker, pipe)
                worker.heartbeat(pipeline=pipe)
                pipe.execute()
        runs = list(self._open)
        for start in range(0, len(runs), BEATS_MAX):
            with self._connection.pipeline() as pipe:
                self._entries.beats(pipe, runs[start : start + BEATS_MAX])
                pipe.execute()
