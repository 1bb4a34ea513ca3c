"""The keeper of many leases: one thread, one connection, and each holder is told of its own loss only."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis

from tests.support.agents import Bench, Line
from tests.support.waiting import wait_until
from worker import leases
from worker.clock import SystemClock
from worker.dispatch import open_store
from worker.errors import CancelRequested, LeaseLost
from worker.leases import Leases
from worker.settings import load_settings
from worker.state.lease import Holder
from worker.state.task import NewTask

TTL_MS = 1_500
TASKS = ("one", "two", "three")


class Keeping:
    """Claimed tasks, and a keeper whose line to Redis can be cut."""

    def __init__(self) -> None:
        self.bench = Bench(clock=SystemClock(), lease_ttl_ms=TTL_MS, lease_margin_ms=300)
        self.line = Line()
        self.keeper = Leases(self.bench.open(self.line))
        self.holders = [self.claim(one) for one in TASKS]

    def claim(self, task_id: str) -> Holder:
        self.bench.enqueue(task_id=task_id)
        claimed = self.bench.store.claim(task_id, 1, {})
        assert isinstance(claimed, Holder)
        return claimed

    def deadline_ms(self, task_id: str) -> float:
        return float(self.bench.store.client.zscore(self.bench.store.keys.index("running"), task_id) or 0)


@pytest.fixture
def keeping() -> Iterator[Keeping]:
    """All are kept while the test runs."""
    made = Keeping()
    with made.keeper, ExitStack() as stack:
        for holder in made.holders:
            stack.enter_context(made.keeper.keep(holder))
        yield made
    wait_until(lambda: not made.keeper.alive, "the end of its thread")


def test_many_are_held_for_longer_than_a_lease_by_one_thread(keeping: Keeping) -> None:
    before = [keeping.deadline_ms(one) for one in TASKS]
    wait_until(
        lambda: all(keeping.deadline_ms(one) > at + TTL_MS for one, at in zip(TASKS, before, strict=True)),
        "deadlines a whole lease later",
    )
    assert sum(thread.name == "leases" for thread in threading.enumerate()) == 1
    for holder in keeping.holders:
        holder.watch()


def test_one_that_is_kept_no_longer_runs_out_beside_the_others() -> None:
    """The control."""
    keeping = Keeping()
    first, *others = keeping.holders
    with keeping.keeper, ExitStack() as stack:
        for holder in others:
            stack.enter_context(keeping.keeper.keep(holder))
        lock = keeping.bench.store.keys.lock(first.task_id)
        wait_until(lambda: not keeping.bench.store.client.exists(lock), "the end of its lease")
        for holder in others:
            holder.check()


def test_the_loss_of_one_stops_that_one_only(keeping: Keeping, caplog: pytest.LogCaptureFixture) -> None:
    first, second, third = keeping.holders
    keeping.bench.store.recover("two", proof="test", fence=second.fence)
    wait_until(second.stop.is_set, "the holder to be told")
    with pytest.raises(LeaseLost, match="the fence is 2: now"):
        second.check()
    before = keeping.deadline_ms("three")
    wait_until(lambda: keeping.deadline_ms("three") > before, "another round")
    assert not first.stop.is_set()
    assert not third.stop.is_set()
    assert [record.getMessage().split()[:2] for record in caplog.records if "lease-lost" in record.getMessage()] == [
        ["lease-lost", "task=two"]
    ]


def test_of_a_task_that_was_let_go_of_nothing_is_said(keeping: Keeping, caplog: pytest.LogCaptureFixture) -> None:
    keeping.bench.store.hand_over(keeping.holders[0], "drain")
    before = keeping.deadline_ms("three")
    wait_until(lambda: keeping.deadline_ms("three") > before, "another round")
    assert "lease-lost" not in caplog.text


def test_a_cancel_is_learned_of_at_once_when_somebody_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = Keeping()
    monkeypatch.setattr(keeping.keeper, "_period_s", 600.0)
    monkeypatch.setattr(leases, "FIRST_S", 600.0)
    with keeping.keeper, keeping.keeper.keep(keeping.holders[0]):
        keeping.bench.store.cancel("one", by="ann")
        keeping.keeper.renew_now(keeping.holders[0])
        wait_until(keeping.holders[0].stop.is_set, "the holder to be told", timeout=10)
    with pytest.raises(CancelRequested, match="ann"):
        keeping.holders[0].watch()


@pytest.mark.parametrize("trouble", [redis.ConnectionError("cut"), redis.ResponseError("OOM full")], ids=str)
def test_a_round_that_fails_is_tried_again_before_the_leases_are_over(
    keeping: Keeping, caplog: pytest.LogCaptureFixture, trouble: Exception
) -> None:
    caplog.set_level(logging.WARNING)
    keeping.line.broken = trouble
    wait_until(lambda: "renewal-failed" in caplog.text, "a failure")
    keeping.line.broken = None
    before = keeping.deadline_ms("one")
    wait_until(lambda: keeping.deadline_ms("one") > before, "a round")
    for holder in keeping.holders:
        holder.check()


def test_without_redis_for_too_long_all_are_lost_by_their_own_clocks(keeping: Keeping) -> None:
    keeping.line.broken = redis.ConnectionError("cut")
    wait_until(lambda: all(holder.stop.is_set() for holder in keeping.holders), "all to be told")
    with pytest.raises(LeaseLost, match="out of touch"):
        keeping.holders[0].check()


@pytest.mark.server
def test_a_keeper_that_is_cut_is_back_under_another_number_for_all_at_once(
    redis_url: str, redis_client: redis.Redis
) -> None:
    """Long before the next round: others take a number that stays away for the death of all of them."""
    settings = load_settings({}, redis_url=redis_url, lease_ttl_ms=180_000)
    store = open_store(settings)
    holders = []
    for task_id in TASKS:
        store.create(NewTask(task_id, "x", "agents"))
        claimed = store.claim(task_id, 1, {})
        assert isinstance(claimed, Holder)
        holders.append(claimed)

    def numbers() -> set[str]:
        found = [store.client.hget(store.keys.task(one), "beat") or b"" for one in TASKS]
        return {one.decode().rpartition(":")[2] for one in found}

    with Leases(open_store(settings)) as keeper, ExitStack() as stack:
        for holder in holders:
            stack.enter_context(keeper.keep(holder))
        wait_until(lambda: len(numbers()) == 1 and "" not in numbers(), "one number for all")
        for _ in range(3):
            wait_until(lambda: time.monotonic() + 10 < keeper._wakes_at < leases.NEVER, "it to rest for long")
            (before,) = numbers()
            store.client.client_kill_filter(_id=before)

            def another(before: str = before) -> bool:
                return len(numbers()) == 1 and before not in numbers()

            wait_until(another, "another one, long before the next round", timeout=20)
    store.client.close()
