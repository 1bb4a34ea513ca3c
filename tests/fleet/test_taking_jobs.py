"""What our workers do with a job that they took and may not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis
from rq import Queue
from rq.exceptions import StopRequested

from tests.support.waiting import wait_until
from worker import drain
from worker.dispatch import ENTRY_POINT
from worker.fleet import ForkWorker
from worker.settings import load_settings

pytestmark = [pytest.mark.server]

QUEUE = "taken"


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    drain.begin_anew()
    yield
    drain.begin_anew()


@pytest.fixture
def worker(redis_client: redis.Redis) -> ForkWorker:
    """Two jobs wait for it."""
    queue = Queue(QUEUE, connection=redis_client)
    for number in (1, 2):
        queue.enqueue(ENTRY_POINT, "task", number, job_id=f"task-{number}")
    made = ForkWorker([QUEUE], connection=redis_client)
    made.be_ready(load_settings({}))
    return made


def lists(client: redis.Redis) -> tuple[list[bytes], list[bytes]]:
    return client.lrange(f"rq:queue:{QUEUE}", 0, -1), client.lrange(f"rq:queue:{QUEUE}:intermediate", 0, -1)


def told_during_the_pop(worker: ForkWorker, monkeypatch: pytest.MonkeyPatch, told: Callable[[], object]) -> None:
    """The first look at whether to be quiet comes before the pop, the next one after it."""
    looks = iter([False])
    monkeypatch.setattr(worker, "told_to_be_quiet", lambda: next(looks, None) is None and told() is None)


def test_a_worker_told_to_be_quiet_while_it_took_a_job_puts_it_back_to_the_front(
    worker: ForkWorker, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_during_the_pop(worker, monkeypatch, lambda: None)
    with pytest.raises(StopRequested):  # a burst does not wait until it may work again
        worker.dequeue_job_and_maintain_ttl(None)
    assert lists(redis_client) == ([b"task-1", b"task-2"], [])
    assert not worker.baton_queue.held


def test_a_worker_told_to_end_while_it_took_a_job_puts_it_back_to_the_front(
    worker: ForkWorker, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_during_the_pop(worker, monkeypatch, lambda: drain.PROCESS.ask("SIGTERM", 20))
    with pytest.raises(StopRequested):
        worker.dequeue_job_and_maintain_ttl(None)
    assert lists(redis_client) == ([b"task-1", b"task-2"], [])


def test_a_worker_that_was_told_to_end_takes_no_job_at_all(worker: ForkWorker, redis_client: redis.Redis) -> None:
    """Also if one of RQ's broad excepts swallowed what its signal handler raised."""
    drain.PROCESS.ask("SIGTERM", 20)
    with pytest.raises(StopRequested):
        worker.dequeue_job_and_maintain_ttl(None)
    assert lists(redis_client) == ([b"task-1", b"task-2"], [])


def test_any_other_worker_takes_it(worker: ForkWorker, redis_client: redis.Redis) -> None:
    """The control."""
    taken = worker.dequeue_job_and_maintain_ttl(None)
    assert taken is not None
    assert taken[0].id == "task-1"
    assert lists(redis_client) == ([b"task-2"], [b"task-1"])
    assert worker.baton_queue.held


def test_a_worker_that_ends_does_not_wait_for_its_own_ear(worker: ForkWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """RQ wakes the thread that listens for commands and only then tells it to end: asleep again, it cost a second."""
    listens = [0]
    get_message = redis.client.PubSub.get_message

    def counted(*args: object, **options: object) -> object:
        listens[0] += 1
        return get_message(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(redis.client.PubSub, "get_message", counted)
    worker.subscribe()  # type: ignore[no-untyped-call]
    ear, unsubscribe = worker.pubsub_thread, worker.pubsub.unsubscribe
    wait_until(lambda: listens[0] == 2, "it to listen, after the server's answer")

    def woken() -> None:
        unsubscribe()
        wait_until(lambda: listens[0] == 3 or not ear.is_alive(), "it to wake up")

    monkeypatch.setattr(worker.pubsub, "unsubscribe", woken)
    worker.unsubscribe()
    assert not ear.is_alive()
