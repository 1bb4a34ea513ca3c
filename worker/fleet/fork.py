"""`rq worker -w worker.fleet.ForkWorker agents`: RQ's own worker with a few differences.

It imports what a task needs once, in the parent, so that a forked work-horse starts in milliseconds; it refuses a
server that would lose tasks; its horses die with it; and when one of its horses is killed, it hands that task on at
once, for nobody has a better proof of a death than waitpid.

Told to end (SIGTERM, SIGINT, RQ's shutdown command), it takes no more, lets its horse hand the task over at its next
safe point, and is gone before the grace is over (BATON_DRAIN_GRACE_S), with exit code 0. A second signal changes
nothing. If it ends for another reason, the code is 1, so that a supervisor starts it again.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import redis
from rq import Queue, Worker
from rq.exceptions import StopRequested
from rq.executions import Execution
from rq.job import Job
from rq.utils import now

from worker import drain, horse, lookout
from worker.children import end_left_behind
from worker.dispatch import open_store, parts_of
from worker.errors import BatonError
from worker.fleet.base import BatonWorker
from worker.fleet.escort import Escort
from worker.fleet.jobs import BatonQueue
from worker.fleet.start import start
from worker.log import event
from worker.process import die_with_parent, is_child
from worker.state.views import Views

log = logging.getLogger(__name__)


class ForkQueue(BatonQueue):
    """With a `held` of its own."""


class ForkWorker(BatonWorker, Worker):
    """`rq worker -w worker.fleet.ForkWorker agents`."""

    baton_queue = ForkQueue
    _leaving = False
    _stopping = ""  # the job that somebody stopped
    _job_id = ""  # the latest

    def work(self, *args: Any, **options: Any) -> bool:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(0))  # nothing is held yet
        self.be_ready(start())
        drain.begin_anew()
        self._own_pid = os.getpid()
        tell = self.set_shutdown_requested_date
        self._escort = Escort(self.settings, lambda: self._horse_pid, lambda: self._job_id, tell)
        self._escort.start()
        worked = False
        with suppress(StopRequested):  # before or after RQ waits for it
            worked = super().work(*args, **options)
        limited = args or any(options.get(name) for name in ("burst", "max_jobs", "max_idle_time"))
        if not drain.PROCESS.asked and not limited:
            event(log, "worker-lost", level=logging.ERROR, why="RQ has ended it, unasked; its log says why")
            sys.exit(1)
        return worked

    # -- told to end -------------------------------------------------------------------------------------------

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM and SIGINT: no Redis here, and nothing that waits."""
        if drain.PROCESS.asked:
            return
        self._shutdown_requested_date = now()
        drain.PROCESS.ask(f"its worker got {signal.Signals(signum).name}", self.settings.drain_grace_s)
        self._stop_requested = True
        self._escort.wake()
        if not self.baton_queue.held and not self._leaving:  # it waits for a job, or for Redis
            raise StopRequested

    def request_force_stop(self, signum: int, frame: FrameType | None) -> None:
        """A second signal changes nothing."""

    def teardown(self) -> None:
        self._leaving = True
        super().teardown()  # type: ignore[no-untyped-call]  # untyped in rq 3.0

    # -- the horse ---------------------------------------------------------------------------------------------

    def execute_job(self, job: Job, queue: Queue) -> None:
        self._stopping, self._job_id = "", job.id
        try:
            super().execute_job(job, queue)
        finally:
            self._stopped_job_id = None
            self.baton_queue.held = False

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        self._look_around()
        # A signal for the horse waits until it has handlers of its own; until then each would kill it.
        signal.pthread_sigmask(signal.SIG_BLOCK, horse.SIGNALS)
        try:
            super().fork_work_horse(job, queue)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, horse.SIGNALS)

    def _look_around(self) -> None:
        """Here, so that not each horse has to. What is wrong with the server, a horse will find out and say."""
        lookout.tidy_up()
        with suppress(BatonError):
            lookout.require_fit(self.settings, partial(open_store, self.settings))

    def main_work_horse(self, job: Job, queue: Queue) -> None:
        die_with_parent(self._own_pid)
        super().main_work_horse(job, queue)

    def setup_work_horse_signals(self) -> None:
        horse.listen(self.settings)

    def kill_horse(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """A job that somebody stopped is let end in order first; a second stop kills."""
        stopped = self._stopped_job_id
        if stopped and stopped != self._stopping and self._horse_pid:
            self._stopping = stopped
            self._escort.stop(stopped, self._horse_pid)
        elif self._horse_pid:  # RQ would take 0 for a horse's number, and kill its own process group
            super().kill_horse(sig)

    def maintain_heartbeats(self, job: Job, execution: Execution) -> None:
        try:
            super().maintain_heartbeats(job, execution)
        except (redis.ConnectionError, redis.TimeoutError) as error:  # RQ would quit, and our death is the horse's
            event(log, "rq-heartbeat-failed", level=logging.WARNING, job=job.id, why=error)

    def handle_work_horse_killed(self, job: Job, retpid: int, ret_val: int, rusage: Any) -> None:
        super().handle_work_horse_killed(job, retpid, ret_val, rusage)  # type: ignore[no-untyped-call]  # untyped in rq 3.0
        try:
            self._hand_on(parts_of(job.id)[0], retpid, ret_val)
        except Exception as error:  # a sweeper will do it; RQ would quit, with exit code 0
            event(log, "hand-on-failed", level=logging.WARNING, job=job.id, why=error)

    def _hand_on(self, task_id: str, horse_pid: int, status: int) -> None:
        end_left_behind()
        store = open_store(self.settings)
        try:
            running = Views(store.client, store.keys).holder_of(task_id)
            if running and is_child(running.owner, horse_pid):
                how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {status >> 8}"
                drained = self._escort.drained == horse_pid
                proof = f"its work-horse ended with {how}" + (f": {drain.PROCESS.why}" if drained else "")
                store.recover(task_id, proof=proof, fence=running.fence, drained=drained)
        finally:
            store.client.close()
