"""The tasks of a process that runs many at once: a thread each, and one of everything else for all of them.

One store over a few connections, one client of the model, one toolbox, one keeper of leases. So tools must be fit for
being called by several threads, and share what belongs to a process: its working directory, its environment.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import redis
from redis import BlockingConnectionPool

from worker import lookout
from worker.children import end_left_behind
from worker.dispatch import STOPPED_BY, open_store
from worker.errors import BatonError, CancelRequested, LeaseLost, TaskFailed
from worker.fleet.threads_books import Books
from worker.fleet.threads_crew import Crew
from worker.fleet.threads_entries import Ended, Run
from worker.fleet.threads_intake import Taken
from worker.leases import Leases
from worker.log import event
from worker.runtime import Runtime
from worker.settings import Settings
from worker.state.lease import Holder
from worker.state.transact import connect
from worker.stuck import Bounds, Watchdog
from worker.tools import Toolbox, load_toolbox

if TYPE_CHECKING:
    from worker.model import Model

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 16  # only one thread runs at a time; the others wait for the model
POOL_WAIT_S = 60.0  # on a starved machine; a Redis that is away is noticed by those who have a connection
STARTING_MAX = 2 * CONNECTIONS_MAX  # taken and not yet claimed: a job that only waits here, others could have
LEFT_BEHIND_S = 1.0


class Tasks:
    """Runs while its `with` block does. `changed` is called, by any thread, when a task is over."""

    def __init__(
        self, settings: Settings, books: Books, model: Callable[[Settings], Model], changed: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._books = books
        self._changed = changed
        self._crew = Crew()
        keeping = open_store(settings)
        self._leases = Leases(keeping, Watchdog(keeping, Bounds.of(settings)).look)
        self._store = open_store(settings, shared_client(settings))
        self._model = model(settings)
        self._toolbox: Toolbox = load_toolbox(settings.tool_modules, settings)
        self._swept_at = 0.0
        self._runs: dict[Run, None] = {}
        self._starting = 0  # of these, those not yet claimed
        self._room = threading.Condition()

    def __enter__(self) -> Tasks:
        self._leases.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._leases.__exit__(kind, error, tb)

    @property
    def running(self) -> list[Run]:
        return list(self._runs)

    @property
    def busy(self) -> int:
        """Threads that still run something; those of tasks that were taken from them, too."""
        return self._crew.busy

    @property
    def alive(self) -> bool:
        return self._leases.alive

    def await_room(self, timeout_s: float) -> int:
        """For how many more tasks there is room; 0 if there is none within that time."""
        with self._room:
            self._room.wait_for(lambda: self._room_now() > 0, timeout_s)
            return max(0, self._room_now())

    def _room_now(self) -> int:
        return min(self._settings.concurrency - len(self._runs), STARTING_MAX - self._starting)

    def launch(self, taken: Taken) -> None:
        run = Run(taken)
        with self._room:
            self._runs[run] = None
            self._starting += 1
        self._books.started(run)
        self._crew.run(lambda: self._perform(run))

    # -- by other threads ------------------------------------------------------------------------------------------

    def stop(self, job_id: str) -> bool:
        """Somebody stopped the job in RQ: the task is cancelled, and its holder learns of it at once. False if it is
        not run here."""
        run = next((run for run in self.running if run.job.id == job_id), None)
        if run is None:
            return False
        task_id, _ = _arguments(run)
        self._store.cancel(task_id, by=STOPPED_BY)
        run.stop_asked = True
        if run.holder is not None:
            self._leases.renew_now(run.holder)
        return True

    def hand_over_rest(self, why: str) -> None:
        """Take all tasks from their threads: they are fenced, whatever they are in the middle of."""
        for run in self.running:
            holder = run.holder
            if holder is None or holder.released:
                continue
            try:
                self._take_from(holder, why)
            except LeaseLost:  # it let go in this very moment
                continue
            except BatonError as error:  # its lease will run out, or its process be seen to be gone
                event(log, "not-handed-over", level=logging.WARNING, task=holder.task_id, why=error)
                continue
            self._books.ended(run, Ended(f"handed over: {why}"))

    def _take_from(self, holder: Holder, why: str) -> None:
        try:
            self._store.hand_over(holder, why, midway=True)
            event(log, "handed-over", task=holder.task_id, why=why, midway=True)
        except CancelRequested:
            status = self._store.recover(holder.task_id, proof=why, fence=holder.fence, drained=True, midway=True)
            holder.lose("released")
            event(log, "handed-over", task=holder.task_id, why=why, status=status)

    # -- in a task's thread ----------------------------------------------------------------------------------------

    def _perform(self, run: Run) -> None:
        try:
            how = self._attempt(run)
        except TaskFailed as failed:
            how = Ended(error=str(failed))
        except BaseException as error:  # nothing may end the thread unseen
            how = Ended(error="".join(traceback.format_exception(error)))
            if not isinstance(error, BatonError):
                event(log, "job-failed", level=logging.ERROR, job=run.job.id, why=repr(error))
        self._books.ended(run, how)
        with self._room:
            del self._runs[run]
            self._starting -= run.holder is None
            self._room.notify()
        self._changed()

    def _attempt(self, run: Run) -> Ended:
        task_id, delivery = _arguments(run)
        runtime = Runtime(
            self._settings,
            make_model=lambda settings: self._model,
            make_toolbox=lambda settings: self._toolbox,
            make_store=lambda settings: self._store,
            keep=lambda holder: self._kept(run, holder),
            require_fit=partial(lookout.require_fit, self._settings),
        )
        words = runtime.attempt(task_id, delivery)
        if run.stop_asked and words == "cancelled":
            return Ended(error=STOPPED_BY, stopped=True)
        return Ended(words)

    @contextmanager
    def _kept(self, run: Run, holder: Holder) -> Iterator[None]:
        with self._room:
            run.holder = holder
            self._starting -= 1
            self._room.notify()
        if holder.attempt > 1:
            self._sweep_children()
        with self._leases.keep(holder):
            yield

    def _sweep_children(self) -> None:
        """What a dead holder's tools have left running here ends before we go on; a sweeper has done it already."""
        with self._room:
            due = time.monotonic() >= self._swept_at + LEFT_BEHIND_S
            self._swept_at = time.monotonic() if due else self._swept_at
        if due:
            end_left_behind()


def shared_client(settings: Settings) -> redis.Redis:
    """A client for many threads: as `connect` makes it, with a few connections that they wait for."""
    pool: Any = connect(settings.redis_url).connection_pool
    many = max(2, min(settings.concurrency, CONNECTIONS_MAX))
    make: Any = BlockingConnectionPool  # untyped in redis-py 8.1
    shared = make(
        max_connections=many, timeout=POOL_WAIT_S, connection_class=pool.connection_class, **pool.connection_kwargs
    )  # fmt: skip
    return redis.Redis(connection_pool=shared)


def reserve_s(running: int) -> float:
    """How much of the grace so many hand-overs take."""
    return 0.05 + 0.004 * running


def _arguments(run: Run) -> tuple[str, int]:
    """(task id, delivery). Raises ForeignJob."""
    name = run.job.func_name  # reads the job's data, and refuses what is none of ours
    assert name
    task_id, delivery = run.job.args
    return task_id, delivery
