"""RQ's jobs and queues, read by somebody who trusts no one that can write to Redis.

RQ takes from a job's hash what to unpickle, what to import and call, which callbacks to run, where to send web hooks.
Here a job is two plain values for `worker.jobs.run_task`, and nothing else in its hash is read. Whatever is no such job
fails with a sentence; nothing of it is imported or unpickled, and the worker stays.
"""

from __future__ import annotations

import io
import logging
import pickle
import pickletools
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import redis
from rq import Queue
from rq.exceptions import DeserializationError, NoSuchJobError, StopRequested
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job

from worker import drain
from worker.dispatch import ENTRY_POINT, STOPPED
from worker.log import event

log = logging.getLogger(__name__)

DATA_MAX_BYTES = 10_000

# All that is read of a job's hash, beside `data`. Not: callbacks, web hooks, dependencies, retries, repeats, rate
# limits, groups, meta and results.
FIELDS = frozenset(
    {
        b"created_at", b"enqueued_at", b"started_at", b"ended_at", b"last_heartbeat", b"origin", b"worker_name",
        b"description", b"timeout", b"result_ttl", b"failure_ttl", b"status",
    }
)  # fmt: skip
_NUMBERS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
CALLBACK = frozenset({b"stopped_callback_name", b"stopped_callback_timeout"})


class ForeignJob(DeserializationError):
    """This is no job of Baton's, so it is not run."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class PlainData:
    """RQ's default format, reduced to plain data: a pickle that names anything to be imported is refused. So is one
    that numbers what it remembers, as old protocols do: nine bytes of that can ask for all the memory there is."""

    dumps: ClassVar[Callable[[Any], bytes]] = partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def loads(data: bytes) -> Any:
        if any(operation.name in _NUMBERS for operation, _, _ in pickletools.genops(data)):
            raise ValueError("a pickle of an old protocol")
        return _PlainUnpickler(io.BytesIO(data)).load()


class BatonJob(Job):
    """Runs `worker.jobs.run_task(task_id, delivery)`. `refused`: why it does not; told as ForeignJob when RQ asks for
    the job's function, within its own handling of failures."""

    refused = ""

    def refresh(self) -> None:
        try:
            super().refresh()  # type: ignore[no-untyped-call]  # untyped in rq 3.0
        except redis.ResponseError as error:  # its key is something else
            raise NoSuchJobError(f"{self.key}: {error}") from None

    def restore(self, raw_data: Mapping[bytes, bytes]) -> None:
        fields = {name: value for name, value in raw_data.items() if name in FIELDS}
        if raw_data.get(b"stopped_callback_name") == STOPPED.encode():
            fields |= {name: value for name, value in raw_data.items() if name in CALLBACK}
        try:
            data = _inflated(raw_data[b"data"])
        except KeyError:
            raise NoSuchJobError(f"{self.key} is no job") from None
        try:
            super().restore({**fields, b"data": b""})
        except Exception as error:  # whatever RQ makes of what somebody wrote there
            super().restore({b"data": b"", b"status": b"queued"})
            self.refused = f"its record is not readable: {type(error).__name__}"
        self.description = "".join(c for c in (self.description or "")[:200] if c.isprintable())
        self.data = data

    def _deserialize_data(self) -> None:
        try:
            name, instance, args, kwargs = PlainData.loads(self.data)
        except Exception as error:
            why = "its data names something to import" if isinstance(error, pickle.UnpicklingError) else "no plain data"
            raise ForeignJob(f"refused: {self.refused or f'{why} ({str(error)[:200]})'}") from None
        match instance, args, kwargs:
            case None, (str(), int()), {} if name == ENTRY_POINT and not kwargs and not self.refused:
                self._func_name, self._instance, self._args, self._kwargs = name, None, tuple(args), {}
            case _:
                # Not of just anything: a few bytes can make a list whose text fills the memory.
                named = repr(name[:100]) if isinstance(name, str) else "something without a name"
                asked = f"it asks for {named}; this worker runs {ENTRY_POINT} with a task id and a delivery"
                raise ForeignJob(f"refused: {self.refused or asked}")

    def _execute(self) -> Any:
        from worker.jobs import run_task  # late, and not by the name that came with the job

        return run_task(*self.args)


class BatonQueue(Queue):
    """`held`: a job was taken off a list, and nobody has put it anywhere yet. Of one popping thread only."""

    job_class = BatonJob
    held: ClassVar[bool] = False

    @classmethod
    def lmove(cls, connection: redis.Redis, queue_key: str, timeout: int | None) -> Any:
        cls._free()
        while (found := super().lmove(connection, queue_key, timeout)) is not None and not _is_text(found[1]):
            event(log, "not-a-job", level=logging.WARNING, queue=queue_key, why="its id is no text")
            connection.lrem(IntermediateQueue.get_intermediate_queue_key(queue_key), 1, found[1])
        cls.held = found is not None
        return found

    @classmethod
    def lpop(cls, queue_keys: Any, timeout: int | None, connection: redis.Redis | None = None) -> Any:
        cls._free()
        found = super().lpop(queue_keys, timeout, connection=connection)
        cls.held = found is not None
        return found

    @classmethod
    def _fetch_dequeued_job(
        cls, connection: redis.Redis, queue_key: str, job_id: str, *args: Any, **options: Any
    ) -> tuple[Job, Queue] | None:
        try:
            taken = super()._fetch_dequeued_job(connection, queue_key, job_id, *args, **options)
        except (redis.ConnectionError, redis.TimeoutError):
            raise
        except Exception as error:  # somebody put something else on the list
            event(log, "not-a-job", level=logging.WARNING, queue=queue_key, why=f"{type(error).__name__}: {error}")
            connection.lrem(IntermediateQueue.get_intermediate_queue_key(queue_key), 1, job_id)
            return None
        if taken is not None:
            job, queue = taken
            job.origin = queue.name  # its registries are this queue's, whatever it says of itself
        return taken

    @classmethod
    def _free(cls) -> None:
        """From here on a signal may end the wait; one that came before may have been swallowed by one of RQ's broad
        excepts."""
        cls.held = False
        if drain.PROCESS.asked:
            raise StopRequested

    # Deliveries have no dependents. RQ would fetch and move whatever jobs somebody has entered there.

    def move_dependents_to_ready(self, job: Job, *args: Any, **options: Any) -> dict[str, list[str]]:
        return {}

    def enqueue_dependents(self, job: Job, *args: Any, **options: Any) -> dict[str, list[str]]:
        return {}


def put_back(queue: Queue, job: Job) -> None:
    """A job that was taken, to the front of its queue again."""
    with queue.connection.pipeline(transaction=True) as pipe:
        pipe.lrem(IntermediateQueue.get_intermediate_queue_key(queue.key), 1, job.id)
        pipe.lpush(queue.key, job.id)
        pipe.execute()


def _inflated(raw: bytes) -> bytes:
    """What RQ has compressed, if it is no longer than a delivery's can be; else nothing, which is refused."""
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(raw, DATA_MAX_BYTES)
    except zlib.error:
        data = raw[:DATA_MAX_BYTES]
    else:
        data = b"" if inflate.unconsumed_tail else data
    return data


def _is_text(raw: Any) -> bool:
    try:
        return isinstance(raw, str) or bool(raw.decode())
    except UnicodeDecodeError:
        return False
