"""Wake-ups on RQ: the only module in `worker` that knows RQ (beside the worker classes).

A delivery is one RQ job with the id `<task>-<delivery>` and two arguments, task id and delivery, in RQ's default
format, so that a plain `rq worker` runs it. No task text anywhere in it: RQ prints descriptions into logs and its
dashboard renders them. The job is pushed inside the store's MULTI.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import redis
from redis.client import Pipeline
from rq import Callback, Queue, Worker, get_current_job
from rq.job import Job
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.timeouts import BaseTimeoutException

from worker.settings import Settings
from worker.state.guards import Policy
from worker.state.keys import Keys
from worker.state.store import Store
from worker.state.transact import connect
from worker.state.views import Queued

ENTRY_POINT = "worker.jobs.run_task"
STOPPED = "worker.jobs.stopped"
STOPPED_BY = "stopped in RQ"
WORKER_CLASS_FIELD = "baton"  # of RQ's hash of a worker: our class, which RQ does not write down

# Raised by RQ inside a running job, as an Exception; never to be mistaken for a tool's error.
JOB_TIMEOUTS: tuple[type[BaseException], ...] = (BaseTimeoutException,)


def job_id(task_id: str, delivery: int) -> str:
    """A fresh id for each delivery: RQ keeps an old job's ttl when its id is used again."""
    return f"{task_id}-{delivery}"


def parts_of(job: str) -> tuple[str, int]:
    """(task id, delivery) of a job's id; delivery 0 if it is none of ours."""
    task_id, _, delivery = job.rpartition("-")
    return task_id, int(delivery) if delivery.isdecimal() and delivery.isascii() else 0


def forked_by() -> int | None:
    """The pid of the RQ worker that forked this process as its work-horse, 0 if RQ does not tell; None if this is no
    work-horse."""
    job, name = get_current_job(), os.environ.get("RQ_WORKER_ID")
    if job is None or not name or job.worker_name != name:  # a worker that does not fork; the variable may be inherited
        return None
    pid = job.connection.hget(Worker.redis_worker_namespace_prefix + name, "pid")
    return int(pid or 0)


def told_to_go(client: redis.Redis) -> Callable[[], bool]:
    """For a work-horse: has its RQ worker been asked to end? A stock one waits for its horse and does not tell it."""
    key = Worker.redis_worker_namespace_prefix + os.environ.get("RQ_WORKER_ID", "")
    return lambda: bool(client.hexists(key, "shutdown_requested_date"))


class RqDispatcher:
    """Implements `worker.state.writes.Dispatcher` on RQ queues."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self.client = client
        self.settings = settings

    def push(self, pipe: Pipeline, task_id: str, delivery: int, queue: str, *, at_front: bool = False) -> None:
        # timeout -1: a task may take days; its own lease and deadlines say when it is over, not RQ's alarm.
        self._queue(queue).enqueue_call(
            ENTRY_POINT,
            args=(task_id, delivery),
            timeout=-1,
            result_ttl=self.settings.job_result_ttl_s,
            failure_ttl=self.settings.job_failure_ttl_s,
            description=f"task {task_id}, delivery {delivery}",
            job_id=job_id(task_id, delivery),
            at_front=at_front,
            on_stopped=Callback(STOPPED),
            pipeline=pipe,
        )

    def drop(self, pipe: Pipeline, task_id: str, delivery: int, queue: str) -> None:
        name = job_id(task_id, delivery)
        pipe.lrem(self._queue(queue).key, 0, name)
        pipe.delete(Job.key_for(name))

    def retire(self, pipe: Pipeline, task_id: str, delivery: int) -> None:
        # A job that was lost never gets the ttl RQ gives to jobs that ended; without one its hash stays for ever.
        pipe.expire(Job.key_for(job_id(task_id, delivery)), self.settings.job_failure_ttl_s)

    def missing(self, asked: Sequence[Queued], *, around: int = 0) -> list[Queued]:
        """Those whose job is on no RQ list.

        Reads a part of each list first, where deliveries of about rank `around` are to be expected; only what is
        not there is looked for in the whole list, by the server.
        """
        heads: dict[str, set[bytes | str]] = {}
        start = max(0, around - 2 * len(asked))
        for queue in {queued.queue for queued in asked}:
            window = self.client.lrange(self._queue(queue).key, start, start + 4 * len(asked))
            heads[queue] = set(window)
        unseen = [q for q in asked if job_id(q.task_id, q.delivery).encode() not in heads[q.queue]]
        if not unseen:
            return []
        with self.client.pipeline(transaction=False) as pipe:
            for queued in unseen:
                pipe.lpos(self._queue(queued.queue).key, job_id(queued.task_id, queued.delivery))
            places = pipe.execute()
        return [queued for queued, place in zip(unseen, places, strict=True) if place is None]

    def requeued_by_hand(self, task_id: str, delivery: int, queue: str) -> bool:
        """A failed task's job came back although the task had ended: an operator pressed "requeue", which takes
        the job off RQ's list of failed ones; a doubled delivery leaves it there. Nor was it pressed on a job that RQ
        never closed, its worker having died between the task's end and RQ's: it is still listed as started."""
        name, on_queue = job_id(task_id, delivery), self._queue(queue)
        with self.client.pipeline(transaction=True) as pipe:
            pipe.zscore(FailedJobRegistry(queue=on_queue).key, name)
            pipe.zrange(StartedJobRegistry(queue=on_queue).key, 0, -1)
            failed_at, started = pipe.execute()
        runs = [member for member in started if member.startswith(f"{name}:".encode())]
        return failed_at is None and len(runs) <= 1  # this one

    def _queue(self, name: str) -> Queue:
        return Queue(name, connection=self.client)


def open_store(settings: Settings, client: redis.Redis | None = None) -> Store:
    """The store as the settings describe it, with RQ for its wake-ups. Opens no connection yet."""
    client = client or connect(settings.redis_url)
    policy = Policy(
        lease_ttl_ms=settings.lease_ttl_ms,
        lease_margin_ms=settings.lease_margin_ms,
        crashes_in_row_max=settings.crashes_in_row_max,
        crashes_max=settings.crashes_max,
        retention_s=settings.retention_s,
        holder_patience_s=settings.store_retry_max_s,
    )
    return Store(client, RqDispatcher(client, settings), keys=Keys(settings.key_prefix), policy=policy)
