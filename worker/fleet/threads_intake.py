"""Takes jobs off RQ's lists, several in one round trip when there are many.

From one queue a job moves to RQ's intermediate list and is taken off that when its start is in the books; from several
queues it is popped, as RQ does it. What is lost between the two, a sweeper delivers again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rq import Queue
from rq.exceptions import DequeueTimeout, NoSuchJobError
from rq.job import Job
from rq.worker import BaseWorker

from worker.fleet.jobs import put_back
from worker.log import event

log = logging.getLogger(__name__)

JOB_PREFIX = Job.redis_job_namespace_prefix.encode()
BATCH_MAX = 16  # other workers may have nothing to do


@dataclass(frozen=True)
class Taken:
    """A job that is ours now. `from_one`: it is on its queue's intermediate list."""

    job: Job
    queue: Queue
    from_one: bool


class Intake:
    """For one thread."""

    def __init__(self, worker: BaseWorker) -> None:
        self._worker = worker
        self._connection: Any = worker.connection
        self._at_once = 1

    def take(self, room: int, timeout_s: int | None) -> list[Taken]:
        """Up to `room` jobs; waits so long for the first one (None: not at all)."""
        queues = self._worker._ordered_queues
        if len(queues) != 1:
            return self._fetched(self._pop_one(queues, timeout_s), from_one=False)
        (queue,) = queues
        if self._at_once > 1 or timeout_s is None:
            wanted = min(room, self._at_once)
            ids = self._move(queue, wanted)
            # More and more while there is more; one by one, and waiting, when there is not.
            self._at_once = min(self._at_once * 2, BATCH_MAX) if len(ids) == wanted else 1
            if ids or timeout_s is None:
                return self._fetched([(queue, one) for one in ids], from_one=True)
        found = self._connection.blmove(queue.key, queue.intermediate_queue_key, timeout_s)
        if found is None:
            return []
        self._at_once = 2
        return self._fetched([(queue, found)], from_one=True)

    def put_back(self, taken: list[Taken]) -> None:
        """To the front of their queues, in their order: this worker takes nothing any more."""
        for one in reversed(taken):
            put_back(one.queue, one.job)

    def _move(self, queue: Queue, number: int) -> list[bytes]:
        with self._connection.pipeline(transaction=False) as pipe:
            for _ in range(number):
                pipe.lmove(queue.key, queue.intermediate_queue_key)
            return [found for found in pipe.execute() if found is not None]

    def _pop_one(self, queues: list[Queue], timeout_s: int | None) -> list[tuple[Queue, bytes]]:
        by_key = {queue.key: queue for queue in queues}
        try:
            found: Any = Queue.lpop(list(by_key), timeout_s, connection=self._connection)
        except DequeueTimeout:
            return []
        if found is None:
            return []
        key, job_id = found
        queue = by_key[key.decode() if isinstance(key, bytes) else key]
        self._worker.reorder_queues(queue)
        return [(queue, job_id)]

    def _fetched(self, popped: list[tuple[Queue, bytes]], *, from_one: bool) -> list[Taken]:
        """Their jobs; one that does not exist any more, or is none, is dropped, as RQ does."""
        if not popped:
            return []
        with self._connection.pipeline(transaction=False) as pipe:
            for _, raw_id in popped:
                pipe.hgetall(JOB_PREFIX + raw_id)
            found = pipe.execute(raise_on_error=False)
        taken = []
        for (queue, raw_id), fields in zip(popped, found, strict=True):
            try:
                job = self._job(queue, raw_id, fields)
            except (NoSuchJobError, ValueError, TypeError) as error:
                why = f"{type(error).__name__}: {error}"
                event(log, "not-a-job", level=logging.WARNING, queue=queue.key, why=why)
                if from_one:
                    self._connection.lrem(queue.intermediate_queue_key, 1, raw_id)
            else:
                taken.append(Taken(job, queue, from_one))
        return taken

    def _job(self, queue: Queue, raw_id: bytes, fields: Any) -> Job:
        if not isinstance(fields, dict):
            raise NoSuchJobError(str(fields))  # its key is something else
        job = self._worker.job_class(raw_id.decode(), connection=self._connection, serializer=self._worker.serializer)
        job.restore(fields)
        job.origin = queue.name  # its registries are this queue's, whatever it says of itself
        return job
