"""What our worker classes have in common: which jobs they read, when they take none, what they tell RQ."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis
from rq import Queue
from rq.exceptions import StopRequested
from rq.job import Job
from rq.utils import ensure_job_list, now
from rq.worker import BaseWorker, WorkerStatus

from worker import drain
from worker.dispatch import WORKER_CLASS_FIELD
from worker.fleet.jobs import BatonJob, BatonQueue, PlainData, put_back
from worker.fleet.quiet import POLL_S, Quiet
from worker.log import event
from worker.settings import Settings
from worker.state.keys import Keys

log = logging.getLogger(__name__)

_TROUBLE = (redis.ConnectionError, redis.TimeoutError)


class BatonWorker(BaseWorker):
    """A mixin, before one of RQ's worker classes. Whatever job class and serializer it is given, it uses its own."""

    baton_queue: type[BatonQueue] = BatonQueue
    settings: Settings
    quiet: Quiet | None = None  # until it works

    def __init__(self, queues: str | Queue | Sequence[str | Queue], *args: Any, **options: Any) -> None:
        given = ensure_job_list(queues)
        names = [one if isinstance(one, str) else one.name for one in given]
        if not args and options.get("connection") is None and given and isinstance(given[0], Queue):
            options["connection"] = given[0].connection
        options |= {"job_class": BatonJob, "queue_class": self.baton_queue, "serializer": PlainData}
        super().__init__(names, *args, **options)

    def be_ready(self, settings: Settings) -> None:
        """Before any work."""
        self.settings = settings
        # Else redis-py looks its own version up for each connection, and each work-horse makes one: 3 ms.
        self.connection.connection_pool.connection_kwargs["driver_info"] = None
        self.quiet = Quiet(self.connection, Keys(settings.key_prefix), self.name)
        self.quiet.forget()

    def told_to_be_quiet(self) -> bool:
        return self.quiet is not None and self.quiet.asked()

    # -- taking jobs -------------------------------------------------------------------------------------------

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Job, Queue] | None:
        """A job, once this worker is not told to be quiet or to end: then what it took goes back to the front."""
        while True:
            self._wait_while_quiet(burst=timeout is None)
            taken = super().dequeue_job_and_maintain_ttl(timeout, max_idle_time)
            if taken is None or not (drain.PROCESS.asked or self.told_to_be_quiet()):
                return taken
            job, queue = taken
            put_back(queue, job)
            self.baton_queue.held = False
            if drain.PROCESS.asked:
                raise StopRequested

    def _wait_while_quiet(self, *, burst: bool) -> None:
        told = False
        while self.told_to_be_quiet():
            if burst or drain.PROCESS.asked:
                raise StopRequested
            with suppress(*_TROUBLE):
                if not told:
                    event(log, "quiet", worker=self.name)
                    self.set_state(WorkerStatus.SUSPENDED)
                    told = True
                self.heartbeat()
            time.sleep(POLL_S)
        if told:
            event(log, "resumed-work", worker=self.name)

    def run_maintenance_tasks(self) -> None:
        """RQ's registries may hold what others have put there; that is no reason to end."""
        try:
            super().run_maintenance_tasks()  # type: ignore[no-untyped-call]  # untyped in rq 3.0
        except (*_TROUBLE, StopRequested):
            raise
        except Exception as error:
            self.last_cleaned_at = now()  # type: ignore[assignment]  # untyped in rq 3.0
            event(log, "maintenance-failed", level=logging.WARNING, why=f"{type(error).__name__}: {error}")

    # -- RQ's commands -----------------------------------------------------------------------------------------

    def handle_payload(self, message: Any) -> None:
        """Whatever somebody has published on this worker's channel: RQ's thread would end, and hear nothing more."""
        try:
            super().handle_payload(message)  # type: ignore[no-untyped-call]  # untyped in rq 3.0
        except Exception as error:
            event(log, "not-a-command", level=logging.WARNING, why=f"{type(error).__name__}: {error}")

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        """RQ's thread comes back after a lost connection, and ends over a timeout."""
        trouble = redis.ConnectionError(str(exc)) if isinstance(exc, (redis.RedisError, OSError)) else exc
        super()._pubsub_exception_handler(trouble, pubsub, pubsub_thread)

    def unsubscribe(self) -> None:
        """RQ tells its thread to end after it has woken it: by then that may sleep again, and is waited for in vain for
        a second of the grace."""
        ear: Any = self.pubsub_thread
        if ear is not None:
            ear.stop()
        super().unsubscribe()  # type: ignore[no-untyped-call]  # untyped in rq 3.0

    # -- what RQ knows -----------------------------------------------------------------------------------------

    def serialize(self) -> dict[str, Any]:
        return {**super().serialize(), WORKER_CLASS_FIELD: type(self).__name__}

    def register_death(self) -> None:
        if self.quiet is not None:
            self.quiet.forget()
        super().register_death()  # type: ignore[no-untyped-call]  # untyped in rq 3.0
