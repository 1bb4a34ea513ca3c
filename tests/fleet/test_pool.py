"""`python -m ops.pool`: workers forked from one parent come back when they are killed, and never outlive it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from ops.bench.place import descendants
from ops.processes import free_port
from ops.valkey import Server
from tests.support.fleet import Fleet, running_fleet
from tests.support.processes import Proc, alive
from tests.support.waiting import wait_until
from worker.state.task import Status

pytestmark = [pytest.mark.server, pytest.mark.fleet]

GRACE_S = "3"
START_MAX_S = 90


@pytest.fixture(scope="module")
def fleet(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("pool"), server.url, BATON_DRAIN_GRACE_S=GRACE_S) as running:
        yield running


def pool_of(fleet: Fleet, workers: int, queue: str, **variables: str) -> Proc:
    logs = fleet.home / queue
    logs.mkdir()
    options = ["--workers", str(workers), "--queue", queue, "--logs", str(logs)]
    return fleet.start("pool", "python", "-P", "-m", "ops.pool", *options, **variables)


def _listened(fleet: Fleet, queue: str) -> int:
    """How many workers have said so; each slot has a file of its own."""
    return sum(log.read_text().count("Listening on") for log in (fleet.home / queue).glob("worker-?.log"))


def await_listening(fleet: Fleet, queue: str, workers: int) -> None:
    wait_until(lambda: _listened(fleet, queue) == workers, f"{workers} workers on {queue}", timeout=START_MAX_S)
    assert len(list((fleet.home / queue).glob("worker-?.log"))) == workers


def hanging(fleet: Fleet, queue: str) -> str:
    """A task that waits for the model, for as long as anybody lets it."""
    task_id = fleet.enqueue("hangs", queue)
    wait_until(lambda: fleet.views.progress(task_id)["turns"] == 1, "the task's first turn", timeout=60)
    wait_until(lambda: len(fleet.requests(fleet.task(task_id).text)) == 2, "its second request", timeout=60)
    return task_id


def assert_handed_over(fleet: Fleet, task_id: str) -> None:
    task = fleet.task(task_id)
    assert (task.status, task.hand_overs, task.crashes) == (Status.QUEUED, 1, 0)


def test_a_killed_worker_comes_back_and_a_told_pool_drains_and_ends(fleet: Fleet) -> None:
    pool = pool_of(fleet, 2, "told")
    await_listening(fleet, "told", 2)
    victim, peer = sorted(descendants(pool.pid))
    os.kill(victim, signal.SIGKILL)
    pool.expect("terminated by SIGKILL: starting another")
    new = wait_until(lambda: set(descendants(pool.pid)) - {victim, peer}, "another worker", timeout=START_MAX_S)
    assert peer in descendants(pool.pid), "the others are left alone"
    wait_until(lambda: _listened(fleet, "told") == 3, "it to listen", timeout=START_MAX_S)

    task_id = hanging(fleet, "told")
    pool.signal(signal.SIGTERM)
    pool.signal(signal.SIGTERM)
    assert pool.wait(30) == 0
    assert not any(map(alive, [peer, *new]))
    assert pool.descendants() == []
    assert_handed_over(fleet, task_id)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_the_workers_of_a_killed_pool_drain_and_end(fleet: Fleet) -> None:
    pool = pool_of(fleet, 2, "killed")
    await_listening(fleet, "killed", 2)
    task_id = hanging(fleet, "killed")
    assert len(pool.descendants()) == 3
    pool.kill()
    wait_until(lambda: pool.descendants() == [], "the end of all workers", timeout=30)
    assert_handed_over(fleet, task_id)


def test_a_worker_that_ends_by_itself_is_started_again_after_a_growing_pause(fleet: Fleet) -> None:
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    pool = pool_of(fleet, 1, "nobody", BATON_REDIS_URL=nobody)
    pool.expect("starting another in 1 s", timeout=START_MAX_S)
    pool.expect("starting another in 2 s", timeout=START_MAX_S)
    assert pool.terminate(30) == 0, "also between two starts"
