"""`worker.fleet.ForkWorker` in trouble: it stays where RQ's worker would quit, and refuses what would end badly."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.fleet import Fleet, running_fleet
from tests.support.fleet_own import OwnServer, passing
from tests.support.fleet_workers import listening
from tests.support.processes import Proc, alive
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(240)]

FORKING = ("-w", "worker.fleet.ForkWorker")
GRACE_S = 4.0
EVERY_SECOND = ("--job-monitoring-interval", "1")


@pytest.fixture(scope="module")
def own(server_binary: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, OwnServer]]:
    """A fleet with the usual lease of 15 s, on a server of its own."""
    home = tmp_path_factory.mktemp("ours")
    server = OwnServer(home / "redis")
    try:
        with running_fleet(home, server.url) as fleet:
            yield fleet, server
    finally:
        server.stop()


def ours(fleet: Fleet, queue: str, **variables: str) -> Proc:
    return fleet.worker(queue, options=(*FORKING, *EVERY_SECOND), preload=False, **variables)


def held(fleet: Fleet, queue: str) -> tuple[str, int]:
    """(task, horse) in the middle of a side effect."""
    task_id = fleet.enqueue("held", queue)
    fleet.await_effect(task_id)
    return task_id, int(fleet.task(task_id).owner["pid"])


def test_redis_away_for_a_moment_costs_neither_worker_nor_horse_nor_the_outcome_of_a_side_effect(
    own: tuple[Fleet, OwnServer],
) -> None:
    """RQ's worker quits when its heartbeat meets a Redis that is away; and a horse dies with its worker."""
    fleet, server = own
    worker = listening(ours(fleet, "steady"))
    task_id, horse = held(fleet, "steady")
    server.kill()
    worker.expect("rq-heartbeat-failed")
    passing(0.5)
    server.start()
    fleet.open_gate(task_id)
    outcome = fleet.ended(task_id)
    assert outcome.problems() == []
    assert (outcome.task.attempts, outcome.task.crashes) == (1, 0)
    assert outcome.results == [("appended line", False)]
    assert fleet.ended(fleet.enqueue("short", "steady")).problems() == []
    worker.assert_running()
    wait_until(lambda: not alive(horse), "the horse to end")


def test_a_stock_worker_that_quits_then_takes_its_horse_with_it(own: tuple[Fleet, OwnServer]) -> None:
    """The control, and a known edge: the side effect's outcome is unknown."""
    fleet, server = own
    worker = fleet.worker("stock", options=EVERY_SECOND)
    listening(worker)
    task_id, horse = held(fleet, "stock")
    server.kill()
    assert worker.wait() != 0
    wait_until(lambda: not alive(horse), "the horse to die with it")
    server.start()
    listening(fleet.worker("stock"))
    outcome = fleet.ended(task_id, sweeping=True)
    assert outcome.problems() == []
    assert (outcome.ran, outcome.results[0][1]) == ({"append": 1}, True)


def test_a_hand_on_that_finds_no_redis_is_left_to_a_sweeper_and_the_worker_stays(
    own: tuple[Fleet, OwnServer],
) -> None:
    """The server takes no more connections: RQ has its own, ours is refused. RQ would quit, with exit code 0."""
    fleet, _ = own
    worker = listening(ours(fleet, "crowded"))
    task_id, horse = held(fleet, "crowded")
    before = fleet.redis.config_get("maxclients")["maxclients"]
    fleet.redis.config_set("maxclients", len(fleet.redis.client_list()))
    try:
        os.kill(horse, signal.SIGKILL)
        wait_until(lambda: not alive(horse), "the horse to die")
        until = time.monotonic() + 20
        while "hand-on-failed" not in worker.output() and "recovered" not in worker.output():
            # The dead horse's own connections leave room: fill it.
            fleet.redis.config_set("maxclients", len(fleet.redis.client_list()))
            if time.monotonic() > until:
                break
    finally:
        fleet.redis.config_set("maxclients", before)
    outcome = fleet.ended(task_id, sweeping=True)
    assert outcome.problems() == []
    assert outcome.ran == {"append": 1}
    assert fleet.ended(fleet.enqueue("short", "crowded"), sweeping=True).problems() == []
    worker.assert_running()


def test_a_drain_while_redis_hangs_is_over_within_the_grace_and_the_task_goes_on_later(
    own: tuple[Fleet, OwnServer],
) -> None:
    """RQ waits for an answer for minutes. What nobody could write down is recovered as from a crash."""
    fleet, server = own
    worker = listening(ours(fleet, "hung", BATON_DRAIN_GRACE_S=str(GRACE_S)))
    task_id, horse = held(fleet, "hung")
    server.hang()
    try:
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        worker.wait()
        assert time.monotonic() - began < GRACE_S + 1
        wait_until(lambda: not alive(horse), "its horse to end with it")
    finally:
        server.go_on()
    listening(ours(fleet, "hung"))
    outcome = fleet.ended(task_id, sweeping=True)
    assert outcome.problems() == []
    assert (outcome.ran, outcome.results[0][1]) == ({"append": 1}, True)


@pytest.mark.parametrize(
    ("variables", "code", "why"),
    [
        ({"BATON_TOOLS": "no_such_module"}, 2, "no_such_module"),
        ({"BATON_TURNS_MAX": "many"}, 2, "BATON_TURNS_MAX"),
        ({"BATON_REDIS_URL": "redis://127.0.0.1:1/0"}, 3, "no answer from Redis"),
    ],
    ids=["tools", "settings", "redis"],
)
def test_what_would_end_every_task_badly_is_said_at_the_start(
    own: tuple[Fleet, OwnServer], variables: dict[str, str], code: int, why: str
) -> None:
    fleet, _ = own
    worker = ours(fleet, "refused", **variables)
    assert worker.wait() == code
    assert why in worker.output()
    assert "Traceback" not in worker.output()


def test_a_server_that_may_evict_keys_is_refused_at_the_start_and_by_a_stock_workers_first_task(
    own: tuple[Fleet, OwnServer],
) -> None:
    """F01."""
    fleet, _ = own
    fleet.redis.config_set("maxmemory-policy", "volatile-lru")
    try:
        worker = ours(fleet, "evicting")
        assert worker.wait() == 3
        assert "maxmemory-policy volatile-lru" in worker.output()
        sweeper = fleet.sweeper()
        assert sweeper.wait() == 3
        assert "Traceback" not in sweeper.output()
        task_id = fleet.enqueue("short", "evicting")
        stock = listening(fleet.worker("evicting"))
        stock.expect("maxmemory-policy volatile-lru")
        assert fleet.task(task_id).attempts == 0
        accepted = listening(ours(fleet, "accepted", BATON_ALLOW_EVICTION="1"))
        assert fleet.ended(fleet.enqueue("short", "accepted")).problems() == []
        accepted.assert_running()
    finally:
        fleet.redis.config_set("maxmemory-policy", "noeviction")
    assert fleet.ended(task_id, sweeping=True).problems() == []
