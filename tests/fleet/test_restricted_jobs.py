"""Our worker classes run nothing but tasks, whatever somebody who can write to Redis puts on their queue."""

from __future__ import annotations

import os
import pickle
import zlib
from pathlib import Path

import pytest
from rq import Callback, Queue, Repeat
from rq.exceptions import DeserializationError
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry, clean_registries

from tests.support.fleet import Fleet
from tests.support.fleet_workers import listening
from tests.support.processes import Proc
from tests.support.waiting import wait_until
from worker.dispatch import ENTRY_POINT
from worker.fleet.jobs import BatonQueue

pytestmark = [pytest.mark.server, pytest.mark.fleet]

QUEUE = "guarded"
CLASSES = ["worker.fleet.ForkWorker"]
CALLED: list[object] = []


class Touch:
    """A pickle of it makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module", params=CLASSES)
def worker(fleet: Fleet, request: pytest.FixtureRequest) -> Proc:
    """With a module in its working directory, which is on its path, that leaves a file when it is imported."""
    (fleet.cwd / "evil.py").write_text("from pathlib import Path\nPath('imported').touch()\ndef call(*args): ...\n")
    return listening(fleet.worker(QUEUE, options=("-w", request.param), preload=False))


@pytest.fixture
def queue(fleet: Fleet, worker: Proc) -> Queue:
    return Queue(QUEUE, connection=fleet.redis)


def failed(fleet: Fleet, job: Job) -> str:
    """Why, once it has."""
    wait_until(lambda: job.get_status() == "failed", f"{job.id} to fail")
    return str(job.latest_result().exc_string)


def with_data(job: Job, data: bytes) -> Job:
    """An enqueued job whose data is this."""
    job.connection.hset(job.key, "data", data)
    return job


def push(queue: Queue, data: bytes) -> Job:
    job = with_data(queue.create_job("evil.call"), data)
    job.save()
    with_data(job, data)
    queue.connection.rpush(queue.key, job.id)
    return job


def test_a_foreign_job_fails_with_a_sentence_and_nothing_of_it_is_imported(fleet: Fleet, queue: Queue) -> None:
    """J04. A stock worker would run each of them: see test_stock_worker.py."""
    marks = [fleet.home / name for name in ("data", "meta", "result", "argument")]
    by_name = queue.enqueue("evil.call", 1)
    wrong_arguments = queue.enqueue(ENTRY_POINT, "task", 1, 2)
    in_data = push(queue, zlib.compress(pickle.dumps(Touch(marks[0]))))
    elsewhere = push(queue, b"no pickle at all")
    fleet.redis.hset(
        elsewhere.key, mapping={"meta": pickle.dumps(Touch(marks[1])), "result": pickle.dumps(Touch(marks[2]))}
    )
    in_argument = push(queue, pickle.dumps((ENTRY_POINT, None, (Touch(marks[3]), 1), {})))
    on_instance = push(queue, pickle.dumps((ENTRY_POINT, [1], ("task", 1), {})))
    bomb = push(queue, zlib.compress(bytes(50_000_000)))
    names: list[object] = [ENTRY_POINT]
    for _ in range(60):
        names = [names, names]
    doubling = push(queue, pickle.dumps((names, None, ("task", 1), {})))
    numbering = push(queue, b"\x80\x04Nr\xff\xff\xff\x7f.")  # the standard unpickler makes room for 2**32 of them
    assert "refused: it asks for 'evil.call'; this worker runs worker.jobs.run_task" in failed(fleet, by_name)
    assert "refused: it asks for" in failed(fleet, wrong_arguments)
    assert "refused: its data names something to import (it names posix.mkdir)" in failed(fleet, in_data)
    assert "names something to import" in failed(fleet, in_argument)
    for job in (elsewhere, on_instance, bomb, doubling):
        assert "refused: " in failed(fleet, job)
    assert "refused: no plain data (a pickle of an old protocol)" in failed(fleet, numbering)
    assert not [mark for mark in marks if mark.exists()]
    with pytest.raises(DeserializationError):  # to RQ's own reader it has done its work by then
        _ = Job.fetch(in_data.id, connection=fleet.redis).args
    assert marks[0].exists()
    assert not (fleet.cwd / "imported").exists()


def test_what_else_a_job_asks_for_is_not_read(fleet: Fleet, queue: Queue) -> None:
    """Callbacks, repeats and dependents of a job that may run: its end is RQ's own, and calls nobody."""
    asked = {
        "on_success": Callback("evil.call"),
        "on_failure": Callback("evil.call"),
        "on_stopped": Callback("evil.call"),
    }
    fine = queue.enqueue_call(ENTRY_POINT, args=("no-such-task", 1), repeat=Repeat(times=2), **asked)
    bad = queue.enqueue_call("evil.call", **asked)
    wait_until(lambda: fine.get_status() == "finished", "the job to end")
    assert "no such task" in fine.return_value()
    failed(fleet, bad)
    assert not (fleet.cwd / "imported").exists()
    assert fleet.redis.zcard(f"rq:scheduled:{QUEUE}") == 0


def called(*args: object) -> None:
    """A callback that somebody put into a job."""
    CALLED.append(args)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock"])
def test_the_registries_are_cleaned_without_calling_what_an_abandoned_job_names(fleet: Fleet, ours: bool) -> None:
    """RQ's maintenance calls an abandoned job's failure callback, within the worker itself."""
    CALLED.clear()
    queue = (BatonQueue if ours else Queue)(f"abandoned-{ours}", connection=fleet.redis)
    job = Queue(queue.name, connection=fleet.redis).create_job("evil.call", on_failure=Callback(f"{__name__}.called"))
    job.save()
    job.set_status(JobStatus.STARTED)
    fleet.redis.zadd(queue.started_job_registry.key, {f"{job.id}:execution": 1})
    clean_registries(queue)
    assert job.get_status() == "failed"
    assert len(CALLED) == (0 if ours else 1)


def test_garbage_on_the_queue_costs_neither_the_worker_nor_a_task(fleet: Fleet, queue: Queue, worker: Proc) -> None:
    """RQ's worker quits over an id that is no id, and over a hash that it cannot read."""
    fleet.redis.rpush("rq:job:a-list", "x")
    unreadable = queue.enqueue(ENTRY_POINT, "task", 1)
    fleet.redis.hset(unreadable.key, mapping={"status": "odd", "created_at": "yesterday", "result_ttl": "long"})
    fleet.redis.lpush(queue.key, "no such job", "sp ace/../", b"\xff\xfe", "a-list", "gone")
    [name] = [key.removeprefix(b"rq:worker:").decode() for key in fleet.redis.smembers(f"rq:workers:{QUEUE}")]
    for command in (b"no json", b"{}", b'{"command": "stop-job"}', b"\xff"):
        assert fleet.redis.publish(f"rq:pubsub:{name}", command) == 1
    done = fleet.ended(fleet.enqueue("short", QUEUE))
    assert done.problems() == []
    assert done.task.attempts == 1
    worker.assert_running()
    worker.expect("not-a-command")
    assert fleet.redis.pubsub_numsub(f"rq:pubsub:{name}") == [(f"rq:pubsub:{name}".encode(), 1)]
    assert not StartedJobRegistry(QUEUE, connection=fleet.redis).get_job_ids(cleanup=False)
