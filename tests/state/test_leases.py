"""The lock: always with a ttl, renewed by its holder alone, and taken only from somebody who let it lapse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import redis

from tests.state.kit import (
    AT_B,
    CALL,
    T,
    at_a,
    at_b,
    claim,
    claimed,
    entry_for,
    field,
    lapse,
    make_store,
    marked,
    monitored,
    number,
    queued,
    status,
)
from tests.state.test_endings import after_own_look
from tests.support.waiting import wait_until
from worker.clock import SystemClock
from worker.errors import LeaseLost
from worker.state.store import Store
from worker.state.task import Status
from worker.state.transact import connect


def test_a_renewal_prolongs_the_lock_and_the_deadline(store: Store) -> None:
    holder = claimed(store)
    store.client.pexpire(store.keys.lock(T), 50_000 if store.policy.lease_ttl_ms < 50_000 else 1)
    store.clock.advance(1)  # type: ignore[attr-defined]
    store.renew(holder)
    assert 0 < store.client.pttl(store.keys.lock(T)) <= store.policy.lease_ttl_ms
    deadline = store.client.zscore(store.keys.index("running"), T)
    assert deadline == store.clock.server_ms([]) + store.policy.lease_ttl_ms


def test_a_renewal_brings_an_evicted_lock_back(store: Store) -> None:
    """M6: under memory pressure the locks go first, they carry a ttl. The epoch says who owns the task."""
    holder = claimed(store)
    lapse(store)
    store.renew(holder)
    assert store.client.get(store.keys.lock(T)).decode() == holder.fence
    assert store.recover(T, proof="its lease ran out") is None


def test_a_renewal_after_a_takeover_brings_nothing_back(store: Store) -> None:
    holder = claimed(store)
    lapse(store)
    store.recover(T, proof="p")
    with pytest.raises(LeaseLost, match="the fence is 2: now"):
        store.renew(holder)
    assert not store.client.exists(store.keys.lock(T))


def test_renewals_do_not_disturb_the_holders_commits(store: Store, another: Callable[..., Store]) -> None:
    """The heartbeat runs beside every commit. If the lock were watched there, each beat would abort one (D13)."""
    holder, heart = at_a(store), another()
    tries = after_own_look(store, "tell", lambda: heart.renew(holder))
    store.mark_started(holder, CALL)
    assert len(tries) == 1, "the EXEC went through at once"


def test_a_lock_renewed_between_look_and_write_saves_its_holder(store: Store, another: Callable[..., Store]) -> None:
    """The sweeper has seen the lock gone; before it writes, a slow heartbeat comes through after all."""
    holder, heart = at_a(store), another()
    lapse(store)
    after_own_look(store, "recovered", lambda: heart.renew(holder))
    assert store.recover(T, proof="its lease ran out") is None
    assert (status(store), number(store, "crashes")) == (Status.RUNNING, 0)


def test_a_proof_about_one_holder_takes_nothing_from_the_next(store: Store) -> None:
    """B08: between the proof and the write the task went through other hands."""
    first = at_a(store)
    store.hand_over(first, "drain")
    second = claim(store)
    assert store.recover(T, proof="its process is gone", fence=first.fence) is None
    assert store.recover(T, proof="its process is gone", fence=second.fence) is Status.QUEUED


def test_a_proven_death_does_not_wait_for_the_lock(store: Store) -> None:
    holder = at_a(store)
    assert store.client.exists(store.keys.lock(T))
    assert store.recover(T, proof="its process is gone", fence=holder.fence) is Status.QUEUED
    assert not store.client.exists(store.keys.lock(T))


def test_two_sweepers_count_one_crash(store: Store, another: Callable[..., Store]) -> None:
    at_a(store)
    lapse(store)
    other = another()
    after_own_look(store, "recovered", lambda: other.recover(T, proof="the other sweeper"))
    assert store.recover(T, proof="p") is None
    assert (number(store, "crashes"), field(store, "delivery")) == (1, "2")


# -- on the real server: time passes by itself, and MONITOR sees every command -------------------------------------


@pytest.fixture
def brief(redis_client: redis.Redis, redis_url: str) -> Iterator[Store]:
    """Real time and leases of a third of a second."""
    client = connect(redis_url)
    yield make_store(client, clock=SystemClock(), lease_ttl_ms=300, lease_margin_ms=50)
    client.close()


@pytest.mark.server
def test_a_lease_that_is_not_renewed_runs_out(brief: Store) -> None:
    holder = at_a(brief)
    assert brief.recover(T, proof="its lease ran out") is None, "control: not before its time"
    wait_until(lambda: brief.recover(T, proof="its lease ran out"), "the lease to run out")
    with pytest.raises(LeaseLost):
        brief.mark_started(holder, CALL)


@pytest.mark.server
def test_the_holder_stops_by_its_own_clock_before_anybody_may_take_over(brief: Store) -> None:
    """D10. Nobody is asked: the check is local."""
    holder = at_a(brief)
    seen: list[int] = []

    def lost() -> bool:
        locked = brief.client.exists(brief.keys.lock(T))
        try:
            holder.check()
        except LeaseLost:
            seen.append(locked)
            return True
        return False

    wait_until(lost, "the holder to give up", poll_s=0.001)
    assert seen == [1], "its lock was still there"


@pytest.mark.server
def test_a_lock_that_expires_between_look_and_write_of_a_renewal_is_set_not_prolonged(brief: Store) -> None:
    """PEXPIRE on a key that has just gone would do nothing and look like success."""
    holder = at_a(brief)
    holder.margin_s = -60  # its own bound is another test's business
    waiting = after_own_pexpire(brief, lambda: lapse(brief))
    brief.renew(holder)
    assert waiting == [1, 1], "aborted, and tried again"
    assert brief.client.get(brief.keys.lock(T)).decode() == holder.fence


def after_own_pexpire(store: Store, act: Callable[[], object]) -> list[int]:
    """As `after_own_look`, for the renewal, which has no writer of its own: hooks the index it looks up."""
    original, calls = store.clock.server_ms, []

    class Hooked(SystemClock):
        def server_ms(self, reply: object) -> int:
            calls.append(1)
            if len(calls) == 1:
                act()
            return original(reply)  # type: ignore[arg-type]

    store.clock = Hooked()
    return calls


@pytest.mark.server
def test_every_write_to_a_lock_gives_it_a_ttl_or_ends_it(valkey_store: Store) -> None:
    """D08: an overwrite without PX once made a ttl infinite."""
    store = valkey_store
    queued(store)
    with monitored(store.client) as seen:
        holder = claim(store)
        store.renew(holder)
        lapse(store)
        store.renew(holder)
        store.hand_over(holder, "drain")
        claim(store)
        lapse(store)
        store.recover(T, proof="p")
        store.finish(claim(store), Status.SUCCEEDED, reason="r")
    touching = [words for words in seen.touching(store.keys.lock(T)) if words[0] not in ("EXISTS", "MGET", "WATCH")]
    assert {words[0] for words in touching} == {"SET", "PEXPIRE", "DEL"}
    assert all("PX" in words for words in touching if words[0] == "SET")


@pytest.mark.server
def test_nobody_ever_sees_a_lock_without_a_ttl_or_a_half_saved_turn(valkey_store: Store, redis_url: str) -> None:
    """D01 and A13: looked at all the time while a task runs, from outside."""
    store, keys, over = valkey_store, valkey_store.keys, threading.Event()
    shapes: set[tuple[bool, bool]] = set()
    bad: list[str] = []

    def look() -> None:
        with redis.Redis.from_url(redis_url) as client:
            while not over.is_set():
                with client.pipeline() as pipe:
                    pipe.hmget(keys.checkpoint(T), "pendingToolUse", "messageCount")
                    pipe.lrange(keys.messages(T), -1, -1)
                    pipe.llen(keys.messages(T))
                    pipe.pttl(keys.lock(T))
                    (pending, count), last, stored, ttl = pipe.execute()
                if ttl == -1:
                    bad.append("lock without a ttl")
                if count is not None:
                    shapes.add((pending != b"null", b'"tool_use"' in last[0]))
                    if int(count) != stored:
                        bad.append(f"{count!r} of {stored}")

    watcher = threading.Thread(target=look)
    watcher.start()
    for _ in range(30):
        holder = at_b(store)
        store.renew(holder)
        store.finish(holder, Status.SUCCEEDED, reason="r")
        store.client.delete(*keys.of_task(T), keys.index("finished"))
    over.set()
    watcher.join(10)
    assert bad == []
    assert shapes <= {(True, True), (False, False)}, "pending and calls go together"
    assert shapes, "control: something was seen"


@pytest.mark.server
def test_a_thousand_beats_beside_commits(valkey_store: Store, redis_url: str) -> None:
    """D13: heart and hand share no lock and no connection; every answer belongs to its question."""
    store = valkey_store
    holder, client, over = at_a(store), connect(redis_url), threading.Event()
    heart = make_store(client, clock=store.clock)
    beats: list[int] = []

    def beat() -> None:
        while not over.is_set():
            heart.renew(holder)
            beats.append(1)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        for turn in range(300):
            store.record_result(holder, CALL, entry_for(CALL, f"result {turn}"))
        wait_until(lambda: len(beats) > 300, "some beats")
    finally:
        over.set()
        thread.join(10)
        client.close()
    assert holder.seq == 302
    store.save_results(holder, AT_B.messages[-1], AT_B)


def test_results_recorded_side_by_side_are_all_kept(store: Store) -> None:
    """E11: each call has its own field; nobody reads the whole ledger to write it back."""
    holder = marked(store)
    calls = [type(CALL)(1, f"toolu_{n}", "read", {"n": n}) for n in range(20)]
    threads = [threading.Thread(target=store.record_result, args=(holder, c, entry_for(c, c.id))) for c in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert store.client.hlen(store.keys.ledger(T)) == 20
    assert holder.seq == 23
