"""`renew_all`: many leases in a few round trips, and nobody's trouble is another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from tests.state.kit import advance, claim, field, lapse, new_task
from worker.errors import LeaseLost, RedisUnavailable, StorageRefused
from worker.state.lease import Holder
from worker.state.renewal import BATCH_MAX, TRIES_TOGETHER
from worker.state.store import Store
from worker.state.task import Status

TASKS = [f"t{number}" for number in range(5)]


def held(store: Store, *tasks: str) -> list[Holder]:
    """Claimed, a moment ago."""
    for task_id in tasks:
        store.create(new_task(task_id))
    holders = [claim(store, task_id) for task_id in tasks]
    advance(store, 1)
    return holders


def deadline_ms(store: Store, task_id: str) -> float:
    return float(store.client.zscore(store.keys.index("running"), task_id) or 0)


class Conflicting:
    """Before each of the first `times` EXECs, somebody else changes a key that is watched."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, key: str, times: int) -> None:
        self.execs = 0
        pipeline = type(store.client.pipeline())
        execute = pipeline.execute

        def disturbed(pipe: Any, *args: Any, **options: Any) -> Any:
            if pipe.explicit_transaction and pipe.watching:
                self.execs += 1
                if self.execs <= times:
                    store.client.set(key, store.client.get(key) or b"", keepttl=True)
            return execute(pipe, *args, **options)

        monkeypatch.setattr(pipeline, "execute", disturbed)


def test_all_are_renewed_as_one_is(store: Store) -> None:
    holders = held(store, *TASKS)
    before = [deadline_ms(store, task_id) for task_id in TASKS]
    assert store.renew_all(holders) == [None] * len(TASKS)
    assert [deadline_ms(store, task_id) for task_id in TASKS] == [at + 1000 for at in before]
    assert all(store.client.pttl(store.keys.lock(task_id)) > 0 for task_id in TASKS)
    advance(store, store.policy.lease_ttl_ms / 1000 - 2.5)
    for holder in holders:
        holder.check()


def test_nobody_is_renewed_without_a_holder(store: Store) -> None:
    assert store.renew_all([]) == []


@pytest.mark.parametrize("position", [0, 2, 4])
def test_one_that_is_lost_is_told_so_and_the_others_are_renewed(store: Store, position: int) -> None:
    holders = held(store, *TASKS)
    victim = holders[position]
    store.recover(victim.task_id, proof="test", fence=victim.fence)
    found = store.renew_all(holders)
    assert [isinstance(one, LeaseLost) for one in found] == [one is victim for one in holders]
    assert victim.stop.is_set()
    assert not any(one.stop.is_set() for one in holders if one is not victim)
    assert not store.client.exists(store.keys.lock(victim.task_id)), "it must not take back what it lost"


def test_one_out_of_touch_is_lost_by_its_own_clock_alone(store: Store) -> None:
    first, second = held(store, "t0", "t1")
    advance(store, store.policy.lease_ttl_ms / 1000 - 4)
    store.renew(second)
    advance(store, 2)
    lost, kept = store.renew_all([first, second])
    assert isinstance(lost, LeaseLost)
    assert kept is None


def test_a_cancel_is_learned_of_by_the_one_it_is_for(store: Store) -> None:
    first, second = held(store, "t0", "t1")
    store.cancel("t1", by="ann")
    assert store.renew_all([first, second]) == [None, None]
    assert (first.cancel, second.cancel) == (None, "ann")


def test_a_lock_that_has_lapsed_is_set_again_if_the_task_is_still_ours(store: Store) -> None:
    first, second = held(store, "t0", "t1")
    lapse(store, "t1")
    assert store.renew_all([first, second]) == [None, None]
    assert store.client.get(store.keys.lock("t1")) == second.fence.encode()
    assert 0 < store.client.pttl(store.keys.lock("t1")) <= store.policy.lease_ttl_ms


def test_a_conflict_is_tried_again_together(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    holders = held(store, *TASKS)
    conflicts = Conflicting(store, monkeypatch, store.keys.epoch("t2"), times=1)
    assert store.renew_all(holders) == [None] * len(TASKS)
    assert conflicts.execs == 2


def test_where_one_changes_all_the_time_each_is_renewed_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    holders = held(store, *TASKS)
    before = deadline_ms(store, "t4")
    conflicts = Conflicting(store, monkeypatch, store.keys.epoch("t2"), times=TRIES_TOGETHER)
    assert store.renew_all(holders) == [None] * len(TASKS)
    assert conflicts.execs == TRIES_TOGETHER + len(TASKS)
    assert deadline_ms(store, "t4") > before


def test_a_damaged_key_of_one_is_no_trouble_of_the_others(store: Store) -> None:
    holders = held(store, *TASKS)
    control = store.keys.control("t1")
    store.client.set(control, "not a hash")
    found = store.renew_all(holders)
    store.client.delete(control)
    assert [type(one) for one in found] == [type(None), StorageRefused, *[type(None)] * 3]


def test_without_an_answer_nobody_is_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    holders = held(store, *TASKS)

    def cut(*args: Any, **options: Any) -> Any:
        raise redis.ConnectionError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(store.client, "pipeline", cut)
        with pytest.raises(RedisUnavailable):
            store.renew_all(holders)
    for holder in holders:
        holder.check()


@pytest.mark.server
def test_three_hundred_are_renewed_in_a_handful_of_round_trips(valkey_store: Store) -> None:
    """Counted in packets: what was sent before something was waited for."""
    store = valkey_store
    holders = held(store, *(f"t{number}" for number in range(300)))
    sent = 0
    connection = store.client.connection_pool.get_connection()
    send = connection.send_packed_command

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += 1
        return send(*args, **options)

    connection.send_packed_command = counted
    store.client.connection_pool.release(connection)
    assert store.renew_all(holders) == [None] * 300
    assert 0 < sent <= 3 * 300 / BATCH_MAX
    sent = 0
    for holder in holders[:10]:
        store.renew(holder)
    assert sent >= 20, "the control"


def test_the_end_of_a_task_is_the_end_of_its_renewals(store: Store, another: Callable[..., Store]) -> None:
    """Another thread finishes a task between two rounds; the keeper of leases brings nothing of it back."""
    first, second = held(store, "t0", "t1")
    another().finish(first, Status.SUCCEEDED, reason="r")
    found = store.renew_all([first, second])
    assert isinstance(found[0], LeaseLost)
    assert found[1] is None
    assert not store.client.exists(store.keys.lock("t0"))
    assert store.client.zscore(store.keys.index("running"), "t0") is None
    assert field(store, "status", "t0") == "succeeded"
