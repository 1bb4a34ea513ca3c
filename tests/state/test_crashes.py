"""Crashes are counted, pauses are not; and what ended expires as a whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.state.kit import (
    AT_A,
    AT_B,
    FIRST,
    REQUEST,
    T,
    at_a,
    at_b,
    begun,
    claim,
    claimed,
    dead,
    ended,
    field,
    jobs,
    lapse,
    make_store,
    new_task,
    number,
    parked,
)
from tests.state.test_endings import put_aside
from worker.state.store import Store
from worker.state.task import ParkNote, Status


def crash(store: Store) -> Status | None:
    lapse(store)
    return store.recover(T, proof="its lease ran out")


def test_three_crashes_in_a_row_make_a_task_dead(store: Store) -> None:
    at_a(store)
    outcomes = [crash(store)]
    for _ in range(2):
        claim(store)
        outcomes.append(crash(store))
    assert outcomes == [Status.QUEUED, Status.QUEUED, Status.DEAD]
    assert "crashed 3 times in a row" in field(store, "reason")
    assert jobs(store.client) == []


def test_whoever_finds_a_holder_dead_whose_worker_was_to_end_counts_no_crash_and_only_for_that_holder(
    store: Store,
) -> None:
    """The worker ends a work-horse that does not let go; a sweeper may see it dead before its parent does."""
    holder = at_a(store)
    store.expect_end(T, holder.fence)
    assert (crash(store), number(store, "crashes"), number(store, "handOvers")) == (Status.QUEUED, 0, 1)
    claim(store)
    store.expect_end(T, holder.fence)  # too late: it is another's
    assert (crash(store), number(store, "crashes"), number(store, "handOvers")) == (Status.QUEUED, 1, 1)


def test_control_a_completed_turn_starts_the_count_anew(store: Store) -> None:
    at_a(store)
    crash(store)
    holder = claim(store)
    holder.seq = 2
    store.save_results(holder, AT_B.messages[-1], AT_B)
    assert (number(store, "crashes"), number(store, "crashesInRow")) == (1, 0)
    assert [crash(store), bool(claim(store)), crash(store)] == [Status.QUEUED, True, Status.QUEUED]


def test_a_task_that_gets_on_a_little_each_time_is_dead_after_the_total(backend: Callable[[], object]) -> None:
    """Each attempt completes a turn and crashes: never three in a row, and still not for ever."""
    store = make_store(backend(), crashes_max=5)  # type: ignore[arg-type]
    at_b(store)
    outcomes = []
    for _ in range(5):
        outcomes.append(crash(store))
        store.client.hset(store.keys.task(T), "crashesInRow", 0)  # as save_results does
        if outcomes[-1] is Status.QUEUED:
            claim(store)
    assert outcomes == [Status.QUEUED] * 4 + [Status.DEAD]
    assert "5 in all" in field(store, "reason")


@pytest.mark.parametrize("verb", ["park", "hand_over"])
def test_putting_a_task_aside_is_no_crash(store: Store, verb: str) -> None:
    put_aside(store, at_a(store), verb)
    assert (number(store, "crashes"), number(store, "crashesInRow")) == (0, 0)


def test_a_recovered_task_goes_to_the_front_with_a_new_delivery(store: Store) -> None:
    at_a(store)
    for other in ("t2", "t3"):
        store.create(new_task(other))
    crash(store)
    assert jobs(store.client) == [f"{T}-2", "t2-1", "t3-1"]
    assert store.client.ttl(f"rq:job:{T}-1") > 0, "the job that was lost does not stay for ever"


def test_a_parked_task_says_why_and_until_when_and_nothing_of_it_stays(store: Store) -> None:
    parked(store)
    assert (field(store, "reason"), int(field(store, "wakeAtMs"))) == ("waits", store.clock.server_ms([]) + 5_000)
    store.wake(T)
    assert (field(store, "reason"), field(store, "wakeAtMs")) == ("", "")


def test_a_park_that_is_not_the_tasks_fault_spends_no_attempt(store: Store) -> None:
    holder = claimed(store)
    store.park(holder, "too new", wait_ms=1, note=ParkNote(streak=2, turns=0, spends_attempt=False))
    assert [field(store, name) for name in ("attempts", "parks", "parkStreak", "parkedAtTurns")] == ["0", "1", "2", "0"]


def test_hand_overs_go_to_the_front(store: Store) -> None:
    holder = begun(store)
    store.create(new_task("t2"))
    store.hand_over(holder, "drain")
    assert jobs(store.client) == [f"{T}-2", "t2-1"]
    assert number(store, "handOvers") == 1


# -- expiry --------------------------------------------------------------------------------------------------------


def test_no_key_of_a_live_task_has_a_ttl_but_the_lock(store: Store) -> None:
    """F12. The lock: never without one (D01)."""
    at_b(store)
    ttls = {key: store.client.pttl(key) for key in store.keys.of_task(T) if store.client.exists(key)}
    assert set(ttls.values()) == {-1}
    assert len(ttls) == 7, "all but control, which nobody has written to"
    assert 0 < store.client.pttl(store.keys.lock(T)) <= store.policy.lease_ttl_ms


@pytest.mark.parametrize("how", ["finish", "cancel", "dead"])
def test_all_keys_of_an_ended_task_expire_together_and_a_retry_keeps_them(store: Store, how: str) -> None:
    if how == "dead":
        dead(store)
    elif how == "cancel":
        parked(store)
        store.cancel(T, by="ann")
    else:
        ended(store, Status.FAILED)
    moments = {store.client.pexpiretime(key) for key in store.keys.of_task(T) if store.client.exists(key)}
    assert moments == {int(field(store, "finishedAtMs")) + store.policy.retention_s * 1000}
    store.retry(T, by="ann")
    assert {store.client.pttl(key) for key in store.keys.of_task(T) if store.client.exists(key)} == {-1}


def test_the_conversation_grows_by_what_a_turn_added(store: Store) -> None:
    """E09: the history was stored anew in every step."""
    holder = claimed(store)
    store.begin(holder, REQUEST, FIRST)
    store.save_response(holder, AT_A.messages[-1], AT_A)
    store.save_results(holder, AT_B.messages[-1], AT_B)
    assert store.client.llen(store.keys.messages(T)) == 3
    store.save_response(holder, None, AT_B)
    assert store.client.llen(store.keys.messages(T)) == 3, "counted, but not kept"
