"""Whose turn it is, with real workers: priorities of queues, and places of a concurrency key through a kill."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.fleet import Fleet
from tests.support.fleet_workers import listening
from tests.support.processes import Proc
from tests.support.waiting import wait_until
from worker.state.standing import text
from worker.state.task import Status

pytestmark = [pytest.mark.server, pytest.mark.fleet]

FORKING = ["-w", "worker.fleet.ForkWorker"]


@pytest.fixture(scope="module")
def sweeper(fleet: Fleet) -> Proc:
    return fleet.sweeper()


def test_what_is_on_the_first_queue_is_done_first_whenever_it_came(fleet: Fleet, sweeper: Proc) -> None:
    """And a job of such a worker that is lost between pop and start, where RQ keeps no other list, a sweep finds."""
    early = [fleet.enqueue("short", "agents") for _ in range(2)]
    urgent = [fleet.enqueue("short", "high") for _ in range(2)]
    lost = fleet.enqueue("short", "high")
    assert fleet.redis.lrem("rq:queue:high", 1, f"{lost}-1") == 1
    listening(fleet.worker("high", "agents", options=FORKING, preload=False))
    done = [fleet.ended(task_id) for task_id in [*urgent, *early]]
    assert [one.problems() for one in done] == [[]] * 4
    ends = [one.task.finished_at_ms for one in done]
    assert ends == sorted(ends), "urgent ones first, each queue in its order"
    assert fleet.ended(lost).task.delivery == 2


def test_the_place_of_a_killed_worker_goes_to_the_next_and_never_do_two_have_it(fleet: Fleet, sweeper: Proc) -> None:
    for _ in range(2):
        listening(fleet.worker("places", options=FORKING, preload=False))
    key = fleet.store.keys.slots("k")
    tasks = [fleet.enqueue("held", "places", concurrency_key="k", concurrency=1) for _ in range(3)]

    def running() -> list[str]:
        found = [one for one in map(text, fleet.redis.zrange(fleet.store.keys.index("running"), 0, -1)) if one in tasks]
        assert len(found) <= 1
        return found

    fleet.await_effect(first := wait_until(running, "one of them to run")[0])
    others = [task_id for task_id in tasks if task_id != first]
    for task_id in others:
        fleet.await_status(task_id, Status.PARKED)
    assert set(map(text, fleet.redis.smembers(key))) == {first}
    os.kill(fleet.task(first).owner["pid"], signal.SIGKILL)
    wait_until(lambda: [one for one in running() if one != first], "another one to have the place")
    for task_id in tasks:
        fleet.open_gate(task_id)
    for task_id in tasks:
        running()
        fleet.await_status(task_id, Status.SUCCEEDED)
    assert fleet.task(first).crashes == 1
    assert not fleet.redis.exists(key)
