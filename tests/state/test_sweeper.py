"""The sweeper on a real server: what it takes up, what it must leave alone, and that nothing stops it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.state.kit import (
    QUEUE,
    T,
    advance,
    at_a,
    at_b,
    claim,
    ended,
    field,
    jobs,
    kinds,
    lapse,
    make_store,
    new_task,
    number,
    parked,
    queued,
    status,
    sweeper_of,
)
from tests.support.waiting import wait_until
from worker.clock import SystemClock
from worker.process import this_process
from worker.state.lease import Holder
from worker.state.store import Store
from worker.state.task import Status
from worker.state.transact import connect
from worker.sweeper import Sweeper

pytestmark = pytest.mark.server

GRACE_S = 3.0


@pytest.fixture
def store(valkey_store: Store) -> Store:
    return valkey_store


# -- running -------------------------------------------------------------------------------------------------------


def test_a_lapsed_lease_is_taken_up(store: Store, sweeper: Sweeper) -> None:
    at_a(store)
    lapse(store)
    advance(store, store.policy.lease_ttl_ms / 1000)
    report = sweeper.sweep_once()
    assert report.recovered == {T: (Status.QUEUED, "its lease ran out")}
    assert report.lines() == [f"recovered {T}: queued, its lease ran out"]
    assert not sweeper.sweep_once(), "and once only"


def test_control_a_held_task_is_left_alone(store: Store, sweeper: Sweeper) -> None:
    """B04, C07: how long a task takes never matters."""
    holder = at_a(store)
    for _ in range(5):
        advance(store, store.policy.lease_ttl_ms / 1000 - 3)
        store.renew(holder)
        assert not sweeper.sweep_once()
    assert (status(store), number(store, "crashes")) == (Status.RUNNING, 0)


def test_control_an_evicted_lock_gives_its_holder_until_the_deadline(store: Store, sweeper: Sweeper) -> None:
    """The next beat brings it back; to take over at once would be a crash that was none."""
    holder = at_a(store)
    lapse(store)
    assert not sweeper.sweep_once()
    store.renew(holder)
    advance(store, 1)
    assert not sweeper.sweep_once()


CLAIM_AND_WAIT = """
import sys
from worker.dispatch import open_store
from worker.process import this_process
from worker.settings import load_settings
store = open_store(load_settings({}, redis_url=sys.argv[1]))
print(store.claim("t1", 1, this_process()).fence, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(redis_url: str) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a real process that claims the task and holds it."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", CLAIM_AND_WAIT, redis_url]
        started.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        assert b"1:" in started[-1].stdout.readline()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_killed_process_is_noticed_long_before_its_lease_ends(
    store: Store, sweeper: Sweeper, other_process: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """C14: dead workers' jobs waited for the full timeout."""
    queued(store)
    process = other_process()
    assert not sweeper.sweep_once(), "control: it lives"
    process.kill()
    report = wait_until(sweeper.sweep_once, "the sweeper to notice")
    word, proof = report.recovered[T]
    assert (word, proof) == (Status.QUEUED, f"its process {process.pid} on {os.uname().nodename} is gone")
    assert store.client.ttl(f"rq:job:{T}-1") > 0
    assert jobs(store.client)[0] == f"{T}-2"
    store.client.lrem(QUEUE, 0, f"{T}-1")  # that process never popped it


def test_a_process_on_another_machine_is_not_judged_from_here(store: Store, sweeper: Sweeper) -> None:
    queued(store)
    holder = store.claim(T, 1, {**this_process(), "boot": "another machine", "pid": 2**22 + 1})
    assert isinstance(holder, Holder)
    assert not sweeper.sweep_once()


def test_a_task_dead_after_too_many_crashes_is_reported_as_dead(store: Store, sweeper: Sweeper) -> None:
    at_a(store)
    for crash in range(3):
        lapse(store)
        advance(store, store.policy.lease_ttl_ms / 1000)
        report = sweeper.sweep_once()
        if crash < 2:
            claim(store)
    assert report.recovered[T][0] is Status.DEAD
    assert kinds(store)[-2:] == ["recovered", "ended"]


def test_a_task_that_ends_between_look_and_write_is_not_taken_up(store: Store, sweeper: Sweeper) -> None:
    """B08: read the state, wait, act on the old state."""
    holder = at_b(store)
    lapse(store)
    advance(store, store.policy.lease_ttl_ms / 1000)
    holder.confirm(store.clock.monotonic())
    recover = store.recover

    def late(*args: Any, **options: Any) -> Any:
        store.finish(holder, Status.SUCCEEDED, reason="just in time")
        return recover(*args, **options)

    store.recover = late  # type: ignore[method-assign]
    assert sweeper.sweep_once().recovered == {}
    assert (status(store), jobs(store.client)) == (Status.SUCCEEDED, [])


def test_a_task_claimed_between_look_and_write_is_not_delivered_again(store: Store, sweeper: Sweeper) -> None:
    """B06: recovery took a job just after it had been picked up."""
    queued(store)
    store.client.lpop(QUEUE)
    sweeper.sweep_once()
    advance(store, GRACE_S)
    redeliver = store.redeliver

    def late(*args: Any) -> bool:
        claim(store)
        return redeliver(*args)

    store.redeliver = late  # type: ignore[method-assign]
    assert sweeper.sweep_once().redelivered == []
    assert (status(store), jobs(store.client)) == (Status.RUNNING, [])


# -- parked, finished ----------------------------------------------------------------------------------------------


def test_only_what_is_due_is_woken(store: Store, sweeper: Sweeper) -> None:
    parked(store)
    store.create(new_task("later", delay_ms=60_000))
    store.create(new_task("never"))
    store.park(claim(store, "never"), "waits for a person", wait_ms=None)
    advance(store, 5)
    assert sweeper.sweep_once().woken == [T]
    assert (status(store), status(store, "later"), status(store, "never")) == ("queued", "parked", "parked")


def test_ended_tasks_leave_the_index_when_their_keys_have_expired(store: Store, sweeper: Sweeper) -> None:
    """F03: finished jobs filled Redis."""
    ended(store, Status.SUCCEEDED)
    advance(store, store.policy.retention_s - 1)
    assert sweeper.sweep_once().pruned == 0
    store.client.delete(*store.keys.of_task(T))  # what Redis does by its own clock
    advance(store, 1)
    assert sweeper.sweep_once().pruned == 1
    assert store.client.zcard(store.keys.index("finished")) == 0


# -- many at once ----------------------------------------------------------------------------------------------------


def test_two_sweepers_in_tight_loops_take_nothing_from_live_workers(store: Store, redis_url: str) -> None:
    """B06. Real time, real processes' particulars, fifty short tasks, four workers: not one crash is counted."""
    over, seen = threading.Event(), []
    for n in range(50):
        store.create(new_task(f"t{n}"))

    def sweep() -> None:
        client = connect(redis_url)
        sweeping = sweeper_of(make_store(client, clock=SystemClock()))
        while not over.is_set():
            seen.append(sweeping.sweep_once())
        client.close()

    def work() -> None:
        client = connect(redis_url)
        mine = make_store(client, clock=SystemClock())
        while job := client.lpop(QUEUE):
            client.expire(b"rq:job:" + job, 600)
            task_id, _, delivery = job.decode().rpartition("-")
            holder = mine.claim(task_id, int(delivery), this_process())
            assert isinstance(holder, Holder)
            mine.begin(holder, {"model": "m"}, {"role": "user", "content": "x"})
            mine.finish(holder, Status.SUCCEEDED, reason="end_turn")
        client.close()

    workers = [threading.Thread(target=work) for _ in range(4)]
    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    for thread in (*sweepers, *workers):
        thread.start()
    for thread in workers:
        thread.join(60)
    over.set()
    for thread in sweepers:
        thread.join(10)
    assert len(seen) > 2, "control: they did sweep"
    assert not any(seen)
    ids = [f"t{n}" for n in range(50)]
    assert {status(store, task_id) for task_id in ids} == {Status.SUCCEEDED}
    assert {(field(store, "attempts", id), field(store, "crashes", id)) for id in ids} == {("1", "")}
