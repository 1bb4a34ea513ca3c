"""Deliveries that got lost between RQ's pop and our claim: missed for a while, then sent again, once and first."""

from __future__ import annotations

import pytest

from tests.state.kit import (
    QUEUE,
    T,
    advance,
    jobs,
    new_task,
    queued,
)
from worker.state.lease import Holder
from worker.state.store import Store
from worker.sweeper import Sweeper

pytestmark = pytest.mark.server

GRACE_S = 3.0


@pytest.fixture
def store(valkey_store: Store) -> Store:
    return valkey_store


def test_a_waiting_queue_stays_as_it_is(store: Store, sweeper: Sweeper) -> None:
    """B07: a job that nobody had taken yet was treated as stuck."""
    queued(store)
    for _ in range(20):
        advance(store, 60)
        assert not sweeper.sweep_once()
    assert jobs(store.client) == [f"{T}-1"]


@pytest.mark.parametrize("where", ["nowhere", "intermediate"])
def test_a_delivery_that_was_popped_and_never_started_comes_again_once_and_first(
    store: Store, sweeper: Sweeper, where: str
) -> None:
    """C01, C03: RQ would call the one on its intermediate list failed after a minute, and never run it."""
    queued(store)
    if where == "nowhere":
        store.client.lpop(QUEUE)
    else:
        store.client.lmove(QUEUE, f"{QUEUE}:intermediate")
    for other in ("t2", "t3"):
        store.create(new_task(other))
    report = sweeper.sweep_once()
    assert (report.redelivered, report.missed) == ([], 1), "control: between pop and claim it is rightly on no list"
    advance(store, GRACE_S - 0.1)
    assert not sweeper.sweep_once()
    advance(store, 0.1)
    assert sweeper.sweep_once().redelivered == [T]
    assert jobs(store.client) == [f"{T}-2", "t2-1", "t3-1"]
    for _ in range(5):
        advance(store, GRACE_S)
        assert not sweeper.sweep_once(), "not again"


def test_the_grace_begins_anew_when_the_delivery_was_seen_in_between(store: Store, sweeper: Sweeper) -> None:
    queued(store)
    for _ in range(3):
        job = store.client.lpop(QUEUE)
        sweeper.sweep_once()
        advance(store, GRACE_S - 0.1)
        store.client.rpush(QUEUE, job)
        assert not sweeper.sweep_once()
    assert store.client.zcard(store.keys.missing()) == 0


def test_an_emptied_queue_is_filled_again(store: Store, sweeper: Sweeper) -> None:
    """Somebody pressed "empty" in rq-dashboard: its job hashes are gone, too."""
    for task_id in ("t1", "t2", "t3"):
        store.create(new_task(task_id))
        store.client.delete(f"rq:job:{task_id}-1")
    store.client.delete(QUEUE)
    sweeper.sweep_once()
    advance(store, GRACE_S)
    assert sorted(sweeper.sweep_once().redelivered) == ["t1", "t2", "t3"]
    assert len(jobs(store.client)) == 3


def test_a_late_start_of_the_lost_delivery_finds_itself_stale(store: Store, sweeper: Sweeper) -> None:
    queued(store)
    store.client.lpop(QUEUE)
    sweeper.sweep_once()
    advance(store, GRACE_S)
    sweeper.sweep_once()
    assert "stale delivery 1" in store.claim(T, 1, {}).why  # type: ignore[union-attr]


def test_a_job_far_down_a_long_list_is_not_missed(store: Store, sweeper: Sweeper) -> None:
    """More jobs of others in front than the sweeper reads at once."""
    queued(store)
    store.client.lpush(QUEUE, *[f"other-{n}" for n in range(3_000)])
    advance(store, 60)
    assert not sweeper.sweep_once()
    store.client.ltrim(QUEUE, -1, -1)


def test_a_lost_delivery_far_down_a_long_backlog_is_found_in_time(
    store: Store, sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tasks wait than one sweep looks at, perhaps for a queue nobody serves; the lost one is not the oldest."""
    monkeypatch.setattr("worker.sweeper.BATCH", 5)
    for n in range(23):
        store.create(new_task(f"t{n:02}"))
        advance(store, 0.001)
    store.client.lrem(QUEUE, 0, "t17-1")
    for _ in range(6):
        assert not sweeper.sweep_once()
    assert store.client.zrange(store.keys.missing(), 0, -1) == [b"t17:1"]
    advance(store, GRACE_S)
    assert sweeper.sweep_once().redelivered == ["t17"], "in whichever part this sweep looks"
    for _ in range(12):
        advance(store, GRACE_S)
        assert not sweeper.sweep_once()
    assert len(jobs(store.client)) == 23
    assert store.client.zcard(store.keys.missing()) == 0


def test_each_delivery_that_comes_to_nothing_is_waited_for_twice_as_long(store: Store, sweeper: Sweeper) -> None:
    """A machine so loaded that starting takes longer than the grace: every new delivery made the one that was just
    starting stale, and the task was never claimed. A claim sets the grace back."""
    queued(store)
    for wait_s in (GRACE_S, 2 * GRACE_S, 4 * GRACE_S):
        store.client.lpop(QUEUE)
        sweeper.sweep_once()
        advance(store, wait_s - 0.1)
        assert sweeper.sweep_once().redelivered == [], f"control: not before {wait_s} s"
        advance(store, 0.1)
        assert sweeper.sweep_once().redelivered == [T]
    holder = store.claim(T, 4, {})
    assert isinstance(holder, Holder)
    store.hand_over(holder, "test")
    store.client.lpop(QUEUE)
    sweeper.sweep_once()
    advance(store, GRACE_S)
    assert sweeper.sweep_once().redelivered == [T]
