"""One bounded pass over tasks nobody is working on, and the process that repeats it.

Reads indexes and small fields, never conversations. Every change is a verb of the store under WATCH, so any number
of sweepers may run, and one killed in the middle leaves nothing behind. One damaged task never stops a sweep.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import redis

from worker.children import end_left_behind
from worker.dispatch import RqDispatcher, open_store
from worker.errors import BatonError, RedisUnavailable, ServerUnfit, StorageRefused
from worker.log import event
from worker.proofs import Proofs
from worker.settings import Settings
from worker.state import housekeeping
from worker.state.store import Store
from worker.state.task import Status
from worker.state.views import Views

log = logging.getLogger(__name__)

BATCH = 500
EARLY_MIN_S = 0.02  # between two looks for what is due, however close together that is


@dataclass
class SweepReport:
    """What one pass did. `recovered`: task id → (new status, proof); `problems`: task id → what went wrong."""

    recovered: dict[str, tuple[Status, str]] = field(default_factory=dict)
    redelivered: list[str] = field(default_factory=list)
    woken: list[str] = field(default_factory=list)
    missed: int = 0
    pruned: int = 0
    problems: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.recovered or self.redelivered or self.woken or self.pruned or self.problems)

    def lines(self) -> list[str]:
        """The report in words, a line a thing."""
        return [
            *(f"recovered {task}: {status}, {proof}" for task, (status, proof) in self.recovered.items()),
            *(f"delivered again {task}" for task in self.redelivered),
            *(f"woken {task}" for task in self.woken),
            *([f"{self.missed} queued but on no RQ list; delivered again if the next sweep misses them too"]
              if self.missed else []),
            *([f"dropped {self.pruned} expired tasks from the index"] if self.pruned else []),
            *(f"problem with {task}: {what}" for task, what in self.problems.items()),
        ]  # fmt: skip


class Sweeper:
    """Sweeps one Redis."""

    def __init__(self, store: Store, dispatcher: RqDispatcher, settings: Settings) -> None:
        self.store = store
        self.views = Views(store.client, store.keys, store.clock)
        self.dispatcher = dispatcher
        self.settings = settings
        self.proofs = Proofs(store.client)
        self._place = 0
        self._more_due = False
        self._woken_until_ms = 0

    def sweep_once(self) -> SweepReport:
        """One pass. Raises RedisUnavailable or StorageRefused; trouble with a single task goes into the report."""
        report = SweepReport()
        try:
            now = self.views.now_ms()
            for step in (self._recover, self._redeliver, self._wake, self._offer, self._prune):
                try:
                    step(report, now)
                except redis.ResponseError as error:  # full, read-only, a damaged index: the other steps may do
                    report.problems[f"the sweep itself ({step.__name__.strip('_')})"] = str(error)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise RedisUnavailable(f"no answer from Redis: {error}") from error
        except redis.ResponseError as error:  # busy with a script, no permission: not even the time is to be had
            raise StorageRefused(f"Redis refuses: {error}") from error
        return report

    def wake_due(self) -> list[str]:
        """Wake what is due, and nothing else. Raises RedisUnavailable or StorageRefused."""
        report = SweepReport()
        try:
            self._wake(report, self.views.now_ms())
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise RedisUnavailable(f"no answer from Redis: {error}") from error
        except redis.ResponseError as error:
            raise StorageRefused(f"Redis refuses: {error}") from error
        return report.woken

    def next_due_s(self) -> float | None:
        """Until the next parked task is due, in seconds; None if no time is set, or it is not to be known. One that was
        due the last time and could not be woken is left to the next sweep."""
        if self._more_due:
            return 0.0
        try:
            now, parked = self.views.now_ms(), self.store.keys.index("parked")
            found = self.views.client.zrangebyscore(
                parked, f"({self._woken_until_ms}", "(+inf", start=0, num=1, withscores=True
            )
        except redis.RedisError:
            return None
        return None if not found else (found[0][1] - now) / 1000

    def rest(self, over: threading.Event, seconds: float) -> None:
        """The pause between two sweeps, in which a parked task is woken when its time comes: the places of a ramp are
        closer together than sweeps should be."""
        end = self.store.clock.monotonic() + seconds
        while not over.is_set() and (left := end - self.store.clock.monotonic()) > 0:
            due = self.next_due_s()
            if due is None or due >= left:
                over.wait(left)
                return
            over.wait(min(left, max(due, EARLY_MIN_S)))
            with suppress(BatonError):  # the next sweep will say it
                for task_id in self.wake_due():
                    log.info("woken %s", task_id)

    def _recover(self, report: SweepReport, now: int) -> None:
        found = list(self.proofs.of(list(self.views.running(BATCH)), now))
        if any(proof.process_is_dead for _, proof in found):
            end_left_behind()
        for running, proof in found:
            recover = partial(self.store.recover, proof=proof.words, fence=proof.fence, beat=proof.beat)
            status = self._try(report, running.task_id, partial(recover, running.task_id))
            if status is not None:
                report.recovered[running.task_id] = (status, proof.words)

    def _redeliver(self, report: SweepReport, now: int) -> None:
        client, keys = self.store.client, self.store.keys
        known = housekeeping.missed(client, keys)
        missed = [name.rpartition(":")[0] for name in known]
        queued = self.views.queued(self._place, BATCH, also=missed)
        missing = self.dispatcher.missing(queued, around=self._place)
        # A long backlog is looked through in turns; what was missed once is looked for in every sweep.
        self._place += BATCH
        if self._place >= client.zcard(keys.index("queued")):
            self._place = 0
        lost = housekeeping.overdue(client, keys, known, missing, now, self.settings.redeliver_grace_ms)
        report.missed = len(missing) - len(lost)
        for one in lost:
            if self._try(report, one.task_id, partial(self.store.redeliver, one.task_id, one.delivery)):
                report.redelivered.append(one.task_id)

    def _wake(self, report: SweepReport, now: int) -> None:
        for task_id in self.views.due("parked", now, BATCH):
            if self._try(report, task_id, partial(self.store.wake, task_id, due_only=True)):
                report.woken.append(task_id)
        self._more_due, self._woken_until_ms = len(report.woken) == BATCH, now

    def _offer(self, report: SweepReport, now: int) -> None:
        """Free places of concurrency keys, and room in budgets, to tasks that wait for them."""
        report.woken += self._try(report, "places of concurrency keys", self.store.offer_places) or []
        report.woken += self._try(report, "budgets", self.store.offer_budgets) or []

    def _prune(self, report: SweepReport, now: int) -> None:
        before = now - self.settings.retention_s * 1000
        report.pruned = housekeeping.prune(self.store.client, self.store.keys, before)

    def _try(self, report: SweepReport, task_id: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except RedisUnavailable:
            raise
        except (BatonError, redis.ResponseError, ValueError) as error:
            report.problems[task_id] = str(error)
            return None


def make_sweeper(settings: Settings) -> Sweeper:
    store = open_store(settings)
    return Sweeper(store, RqDispatcher(store.client, settings), settings)


def run_forever(settings: Settings) -> None:
    """Sweep until SIGTERM or SIGINT. Waits for a Redis that is away; ends by itself only with ServerUnfit, at start."""
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    sweeper = make_sweeper(settings)
    event(log, "sweeping", period_s=settings.sweep_period_s)
    checked = False
    away, told = False, []
    while not over.is_set():
        try:
            if not checked:
                sweeper.store.require_fit(force=settings.allow_eviction)
                event(log, "server", promise=sweeper.store.promise())
                checked = True
            report = sweeper.sweep_once()
        except ServerUnfit:
            raise
        except BatonError as error:
            if not away:  # once per outage, not once per second
                event(log, "sweep-failed", level=logging.ERROR, why=error)
            away = True
        except Exception:  # a bug of ours: whoever waits for this sweeper must not wait for ever
            log.exception("sweep-failed")
        else:
            if away:
                event(log, "sweeping-again")
            away = False
            lines = report.lines() if report else []
            for line in lines:
                if line not in told:  # a task that stays damaged is not news in every sweep
                    log.info("%s", line)
            told = lines
        sweeper.rest(over, settings.sweep_period_s)
    event(log, "sweeper-stopped")
