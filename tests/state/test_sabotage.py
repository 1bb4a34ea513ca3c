"""The suite can fail: each protection is switched off here, and the bad outcome it prevents does happen.

Every test has two runs of one scenario. With the protection it ends well; without it, as the name says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from tests.state.faults import Fault, Plan, faulty
from tests.state.invariants import check_invariants
from tests.state.kit import (
    CALL,
    QUEUE,
    T,
    at_a,
    claim,
    claimed,
    entry_for,
    jobs,
    lapse,
    make_store,
    new_task,
    number,
    queued,
    status,
)
from tests.state.test_endings import after_own_look
from worker.errors import LeaseLost, RedisUnavailable
from worker.state import guards, standing, transact
from worker.state.keys import call_field
from worker.state.lease import Holder
from worker.state.store import Store
from worker.state.task import Status

BOTH = pytest.mark.parametrize("protected", [True, False], ids=["protected", "sabotaged"])


def lie_about(monkeypatch: pytest.MonkeyPatch, rewrite: Callable[[list[Any]], list[Any]]) -> None:
    """Let the guards decide on answers that `rewrite` has changed."""
    real = transact.transact

    def lying(client: Any, clock: Any, watch: Any, reads: Any, decide: Any, **options: Any) -> Any:
        return real(client, clock, watch, reads, lambda replies: decide(rewrite(replies)), **options)

    monkeypatch.setattr(guards, "transact", lying)


def taken_over(store: Store) -> tuple[Holder, Holder]:
    """(a holder that slept past its lease, the one that has the task now, at the same seq)."""
    sleeper = at_a(store)
    lapse(store)
    store.recover(T, proof="its lease ran out")
    new = claim(store)
    new.seq = sleeper.seq
    return sleeper, new


@BOTH
def test_without_the_fence_a_sleeper_writes_into_the_new_holders_task(
    store: Store, monkeypatch: pytest.MonkeyPatch, protected: bool
) -> None:
    sleeper, new = taken_over(store)
    if protected:
        with pytest.raises(LeaseLost):
            store.record_result(sleeper, CALL, entry_for(CALL, "the sleeper's"))
        store.record_result(new, CALL, entry_for(CALL, "the holder's"))
    else:
        monkeypatch.setattr(Store, "_require_fence", lambda self, holder, fence: None)
        store.record_result(sleeper, CALL, entry_for(CALL, "the sleeper's"))
        with pytest.raises(LeaseLost, match="seq"):
            store.record_result(new, CALL, entry_for(CALL, "the holder's"))
    recorded = store.client.hvals(store.keys.ledger(T))
    assert len(recorded) == 1
    assert (b"the holder's" in recorded[0]) == protected


@BOTH
def test_without_the_fence_a_sleeper_ends_a_task_that_somebody_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch, protected: bool
) -> None:
    sleeper, new = taken_over(store)
    if protected:
        with pytest.raises(LeaseLost):
            store.finish(sleeper, Status.FAILED, reason="the sleeper's")
        store.mark_started(new, CALL)
    else:
        monkeypatch.setattr(Store, "_require_fence", lambda self, holder, fence: None)
        store.finish(sleeper, Status.FAILED, reason="the sleeper's")
    assert status(store) is (Status.RUNNING if protected else Status.FAILED)


@BOTH
def test_without_the_seq_a_holder_writes_over_a_checkpoint_that_lost_its_last_steps(
    store: Store, monkeypatch: pytest.MonkeyPatch, protected: bool
) -> None:
    """F04: a failover rolled acknowledged writes back. The holder knows better than the server, and must stop."""
    holder = at_a(store)
    store.mark_started(holder, CALL)
    store.client.hset(store.keys.checkpoint(T), "seq", 2)  # the server forgot the marker's commit
    store.client.delete(store.keys.started(T))
    if protected:
        with pytest.raises(LeaseLost, match="seq 2, this holder left it at 3"):
            store.record_result(holder, CALL, entry_for(CALL))
    else:
        lie_about(monkeypatch, lambda r: [r[0], (str(holder.seq).encode(), r[1][1]), *r[2:]])
        store.record_result(holder, CALL, entry_for(CALL))
    assert store.client.exists(store.keys.ledger(T)) == (not protected)


@pytest.mark.server
@BOTH
def test_without_its_stamp_a_holder_gives_up_over_its_own_commit(
    valkey_store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch, protected: bool
) -> None:
    """M3: the commit was applied, the answer was lost, and redis-py calls that a conflict."""
    store = valkey_store
    holder = at_a(store)
    with faulty(redis_url, Plan(Fault.LOST, 1, execs_only=True)) as client:
        unlucky = make_store(client, clock=store.clock)
        if protected:
            unlucky.mark_started(holder, CALL)
        else:
            lie_about(monkeypatch, lambda r: [r[0], (r[1][0], None), *r[2:]])
            with pytest.raises(LeaseLost, match="seq 3, this holder left it at 2"):
                unlucky.mark_started(holder, CALL)
    assert store.client.hget(store.keys.checkpoint(T), "seq") == b"3", "applied once, in both runs"


@pytest.mark.server
@BOTH
def test_without_its_mark_a_change_with_a_lost_reply_is_reported_as_not_done(
    valkey_store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch, protected: bool
) -> None:
    store = valkey_store
    queued(store)
    if not protected:
        at = standing._FIELDS.index("change")
        lie_about(monkeypatch, lambda r: [[*r[0][:at], None, *r[0][at + 1 :]], *r[1:]])
    with faulty(redis_url, Plan(Fault.LOST, 1, execs_only=True)) as client:
        assert make_store(client, clock=store.clock).redeliver(T, 1) is protected
    assert jobs(store.client).count(f"{T}-2") == 1, "pushed once, in both runs"


@pytest.mark.server
@BOTH
def test_with_one_stamp_for_two_commits_the_second_is_dropped_without_a_word(
    valkey_store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch, protected: bool
) -> None:
    """The first commit's outcome stayed unknown; its number is used again by the next one."""
    store = valkey_store
    holder = at_a(store)
    if not protected:
        monkeypatch.setattr(guards.secrets, "token_hex", lambda size: "same")
    with faulty(redis_url, AfterExec(Fault.LOST)) as client:
        unlucky = make_store(client, clock=store.clock)
        unlucky.policy = type(unlucky.policy)(holder_patience_s=0)
        with pytest.raises(RedisUnavailable):
            unlucky.record_result(holder, CALL, entry_for(CALL, "first"))
    if protected:
        with pytest.raises(LeaseLost):
            store.record_result(holder, CALL, entry_for(CALL, "second"))
    else:
        store.record_result(holder, CALL, entry_for(CALL, "second"))
    assert b"first" in store.client.hvals(store.keys.ledger(T))[0], "in both runs; without the stamp, unnoticed"


class AfterExec(Plan):
    """Everything is lost from the first EXEC on."""

    def next(self, words: list[str]) -> Fault | None:
        self.fired += words[-1] == "EXEC" or self.fired > 0
        return self.fault if self.fired else None


@BOTH
def test_without_watching_the_lock_a_live_holder_is_taken_for_dead(
    store: Store, another: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, protected: bool
) -> None:
    holder, heart = at_a(store), another()
    lapse(store)
    after_own_look(store, "recovered", lambda: heart.renew(holder))
    if not protected:
        change = Store._change
        monkeypatch.setattr(
            Store, "_change", lambda self, task_id, decide, *, watch=(), reads=(): change(self, task_id, decide)
        )
    assert (store.recover(T, proof="its lease ran out") is None) == protected
    assert number(store, "crashes") == (0 if protected else 1)


@BOTH
def test_without_the_multi_a_job_is_pushed_for_a_task_that_was_not_accepted(
    store: Store, another: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, protected: bool
) -> None:
    """F16 the other way round; and each try of a change would push one more."""
    other = another()
    after_own_look(store, "new", lambda: other.create(new_task(words="first come")))
    if not protected:
        dispatcher = store.writes.dispatcher
        push = dispatcher.push

        def push_at_once(pipe: Any, *args: Any, **options: Any) -> None:
            with store.client.pipeline() as own:
                push(own, *args, **options)
                own.execute()

        monkeypatch.setattr(dispatcher, "push", push_at_once)
    with pytest.raises(Exception, match="taken by a task with another text"):
        store.create(new_task(words="second"))
    assert jobs(store.client) == ([f"{T}-1"] if protected else [f"{T}-1", f"{T}-1"])


@BOTH
def test_without_the_epoch_a_commit_goes_through_after_the_takeover(
    store: Store, another: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, protected: bool
) -> None:
    """The takeover comes between the holder's look and its EXEC: what is watched is what aborts it."""
    holder, other = at_a(store), another()
    after_own_look(store, "tell", lambda: (lapse(store), other.recover(T, proof="p")))
    if not protected:
        real = transact.transact
        monkeypatch.setattr(guards, "transact", lambda c, k, watch, *rest, **o: real(c, k, ["other"], *rest, **o))
    if protected:
        with pytest.raises(LeaseLost):
            store.mark_started(holder, CALL)
    else:
        store.mark_started(holder, CALL)
    assert store.client.hexists(store.keys.started(T), call_field(CALL.turn, CALL.id)) == (not protected)


@BOTH
def test_without_watching_the_task_a_cancel_is_left_behind_on_a_parked_one(
    store: Store, another: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, protected: bool
) -> None:
    holder, mover = at_a(store), another()
    after_own_look(store, "tell", lambda: mover.park(holder, "waits", wait_ms=None))
    if not protected:
        real = transact.transact
        monkeypatch.setattr(guards, "transact", lambda c, k, watch, *rest, **o: real(c, k, ["other"], *rest, **o))
    store.cancel(T, by="ann")
    assert status(store) is (Status.CANCELLED if protected else Status.PARKED)


def test_control_the_leak_check_sees_leaks(backend: Callable[[], redis.Redis]) -> None:
    """What runs after every test of this directory must itself be able to fail."""

    for leak in (
        lambda s: s.client.set("rq:job:nobody", "x"),
        lambda s: s.client.set(s.keys.lock(T), "x"),
        lambda s: s.client.expire(s.keys.events(T), 600),
        lambda s: s.client.zadd(s.keys.index("parked"), {T: 1}),
        lambda s: s.client.zrem(s.keys.index("running"), T),
        lambda s: s.client.set("stray", "x"),
    ):
        store = make_store(backend())
        store.client.flushdb()
        claimed(store)
        store.client.delete(QUEUE)
        check_invariants(store)
        leak(store)
        with pytest.raises(AssertionError):
            check_invariants(store)
