"""`rq worker -w worker.fleet.ForkWorker agents`: RQ's own worker with a few differences.

It imports what a task needs once, in the parent, so that a forked work-horse starts in milliseconds; it refuses a
server that would lose tasks; its horses die with it; and when one of its horses is killed, it hands that task on at
once, for nobody has a better proof of a death than waitpid.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import redis
from rq import Queue, Worker
from rq.executions import Execution
from rq.job import Job

from worker.children import end_left_behind
from worker.dispatch import open_store
from worker.fleet.start import start
from worker.log import event
from worker.process import die_with_parent, this_host
from worker.settings import load_settings
from worker.state.views import Views

log = logging.getLogger(__name__)


class ForkWorker(Worker):
    """`rq worker -w worker.fleet.ForkWorker agents`."""

    def work(self, *args: Any, **options: Any) -> bool:
        start()
        return super().work(*args, **options)

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        self._own_pid = os.getpid()
        super().fork_work_horse(job, queue)

    def main_work_horse(self, job: Job, queue: Queue) -> None:
        die_with_parent(self._own_pid)
        super().main_work_horse(job, queue)

    def maintain_heartbeats(self, job: Job, execution: Execution) -> None:
        try:
            super().maintain_heartbeats(job, execution)
        except (redis.ConnectionError, redis.TimeoutError) as error:  # RQ would quit, and our death is the horse's
            event(log, "rq-heartbeat-failed", level=logging.WARNING, job=job.id, why=error)

    def handle_work_horse_killed(self, job: Job, retpid: int, ret_val: int, rusage: Any) -> None:
        super().handle_work_horse_killed(job, retpid, ret_val, rusage)  # type: ignore[no-untyped-call]  # untyped in rq 3.0
        try:
            self._hand_on(job.id.rpartition("-")[0], retpid, ret_val)
        except Exception as error:  # a sweeper will do it; RQ would quit, with exit code 0
            event(log, "hand-on-failed", level=logging.WARNING, job=job.id, why=error)

    def _hand_on(self, task_id: str, horse: int, status: int) -> None:
        end_left_behind()
        store = open_store(load_settings())
        try:
            running = Views(store.client, store.keys).holder_of(task_id)
            # waitpid has freed the horse's number just now: that it is an owner's still proves that it is that owner.
            if running and running.owner.get("pid") == horse and this_host().items() <= running.owner.items():
                how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {status >> 8}"
                store.recover(task_id, proof=f"its work-horse ended with {how}", fence=running.fence)
        finally:
            store.client.close()
