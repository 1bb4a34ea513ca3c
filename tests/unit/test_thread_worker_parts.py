"""Parts of `worker.fleet.ThreadWorker` by themselves: its threads, what it takes, its limits."""

from __future__ import annotations

import logging
import resource
import threading

import fakeredis
import pytest
from rq import Queue, SimpleWorker

from tests.support.waiting import wait_until
from worker.dispatch import job_id, open_store
from worker.fleet import threads_crew
from worker.fleet.jobs import BatonJob, BatonQueue
from worker.fleet.thread import room_for_files
from worker.fleet.threads_crew import Crew
from worker.fleet.threads_intake import BATCH_MAX, Intake, Taken
from worker.fleet.threads_tasks import shared_client
from worker.settings import load_settings
from worker.state.task import NewTask


@pytest.fixture(autouse=True)
def _stacks() -> object:
    before = threading.stack_size()
    yield
    threading.stack_size(before)


def test_a_thread_that_is_idle_gets_the_next_task_and_a_busy_one_none() -> None:
    crew, gate = Crew(), threading.Event()
    names: list[int] = []

    def work() -> None:
        names.append(threading.get_ident())
        gate.wait(10)

    for _ in range(3):
        crew.run(work)
    wait_until(lambda: len(names) == 3, "three at once")
    assert (len(set(names)), crew.busy) == (3, 3)
    gate.set()
    wait_until(lambda: crew.busy == 0, "all to be idle")
    for _ in range(3):
        crew.run(work)
    wait_until(lambda: len(names) == 6 and crew.busy == 0, "three more")
    assert set(names[3:]) <= set(names[:3])


def test_threads_that_were_idle_for_long_go_and_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_crew, "IDLE_MAX_S", 0.01)
    crew = Crew()
    for _ in range(200):
        done = threading.Event()
        crew.run(done.set)
        assert done.wait(10), "work was promised to a thread that has gone"
    wait_until(lambda: crew._all == 0, "all to go")


class Taking:
    """An intake on queues of an empty server."""

    def __init__(self, *queues: str) -> None:
        self.server = fakeredis.FakeServer()
        self.client = fakeredis.FakeRedis(server=self.server)
        self.store = open_store(load_settings({}), fakeredis.FakeRedis(server=self.server))
        self.worker = SimpleWorker(
            [BatonQueue(name, connection=self.client) for name in queues],
            connection=self.client, job_class=BatonJob, queue_class=BatonQueue,
        )  # fmt: skip
        self.intake = Intake(self.worker)

    def enqueue(self, number: int, queue: str = "a") -> list[str]:
        names = [f"{queue}{place:02}" for place in range(number)]
        for name in names:
            self.store.create(NewTask(name, "x", queue))
        return [job_id(name, 1) for name in names]

    def listed(self, key: str) -> list[str]:
        return [raw.decode() for raw in self.client.lrange(key, 0, -1)]


def named(taken: list[Taken]) -> list[str]:
    return [one.job.id for one in taken]


def test_many_jobs_are_taken_more_and_more_at_once_and_no_more_than_there_is_room() -> None:
    taking = Taking("a")
    jobs = taking.enqueue(60)
    sizes, got = [], []
    while taken := taking.intake.take(40, 1 if not got else None):
        sizes.append(len(taken))
        got += named(taken)
    assert got == jobs
    assert sizes[:5] == [1, 2, 4, 8, 16]
    assert max(sizes) == BATCH_MAX
    assert sorted(taking.listed("rq:queue:a:intermediate")) == jobs
    taking = Taking("a")
    taking.enqueue(5)
    taking.intake.take(1, 1)
    assert len(taking.intake.take(1, 1)) == 1


def test_what_is_put_back_is_first_in_its_order_again() -> None:
    taking = Taking("a")
    jobs = taking.enqueue(3)
    taken = taking.intake.take(1, 1) + taking.intake.take(9, 1)
    assert named(taken) == jobs
    taking.intake.put_back(taken)
    assert taking.listed("rq:queue:a") == jobs
    assert taking.listed("rq:queue:a:intermediate") == []


def test_of_several_queues_the_first_comes_first() -> None:
    taking = Taking("a", "b")
    second, first = taking.enqueue(1, "b"), taking.enqueue(1, "a")
    assert [named(taking.intake.take(9, 1)) for _ in range(2)] == [first, second]


def test_what_is_no_job_is_dropped_and_the_others_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    taking = Taking("a")
    taking.client.rpush("rq:queue:a", "nothing", b"\xff")
    (job,) = taking.enqueue(1)
    taken = []
    while not taken:
        taken = taking.intake.take(9, 1)
    assert named(taken) == [job]
    assert taking.listed("rq:queue:a:intermediate") == [job]
    assert caplog.text.count("not-a-job") == 2
    assert Queue("a", connection=taking.client).count == 0


def test_threads_share_a_few_connections_however_many_they_are() -> None:
    assert shared_client(load_settings({}, concurrency=1000)).connection_pool.max_connections == 16
    assert shared_client(load_settings({}, concurrency=1)).connection_pool.max_connections == 2


def test_too_few_files_are_said_so_clearly(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda which, to: limits.append(to))
    room_for_files(1000)
    assert limits == [(1024, 1024)]
    assert "few-files" in caplog.text
    assert "BATON_CONCURRENCY" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        room_for_files(50)
    assert limits[1:] == []
    assert "few-files" not in caplog.text
