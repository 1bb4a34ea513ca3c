"""Places: at most so many tasks of a concurrency key run, whatever befalls them, and nobody waits for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.state.fair_share import KEY, WAYS_OUT, attempt, holders, keyed, line
from tests.state.kit import (
    OWNER,
    advance,
    claim,
    field,
    jobs,
    make_store,
    monitored,
    new_task,
    number,
    pop,
    status,
    sweeper_of,
)
from worker.state.lease import Holder
from worker.state.slots import UNCLAIMED_MS, Slots
from worker.state.standing import Refused
from worker.state.store import Store
from worker.state.task import Status
from worker.state.transact import connect


def test_a_task_that_finds_all_places_taken_is_parked_and_is_woken_by_whoever_frees_one(store: Store) -> None:
    keyed(store, "a", "b", "c", places=2)
    store.create(new_task("other"))
    first, _ = claim(store, "a"), claim(store, "b")
    refused = attempt(store, "c")
    assert isinstance(refused, Refused)
    assert refused.status is Status.PARKED
    assert field(store, "reason", "c") == "waits for one of the 2 places of team-a"
    assert field(store, "waitsFor", "c") == f"slot:{KEY}"
    assert (line(store), holders(store)) == (["c"], {"a", "b"})
    claim(store, "other")  # the control: without the key nobody waits
    store.create(new_task("backlog"))

    store.finish(first, Status.SUCCEEDED, reason="end_turn")
    assert status(store, "c") is Status.QUEUED
    assert jobs(store.client) == ["c-2", "backlog-1"], "it has waited already"
    claim(store, "c")
    assert (line(store), holders(store)) == ([], {"b", "c"})
    assert number(store, "attempts", "c") == 1


@pytest.mark.parametrize("way", WAYS_OUT)
def test_every_way_out_of_running_frees_the_place_and_wakes_the_next(store: Store, way: str) -> None:
    keyed(store, "a", "b")
    holder = claim(store, "a")
    assert isinstance(attempt(store, "b"), Refused)
    WAYS_OUT[way](store, holder)
    assert holders(store) == set()
    assert status(store, "b") is Status.QUEUED
    claim(store, "b")


def test_a_newcomer_does_not_pass_those_who_wait_and_who_was_handed_over_keeps_its_turn(store: Store) -> None:
    keyed(store, "a", "b", "late")
    holder = claim(store, "a")
    advance(store, 1)
    attempt(store, "b")
    store.hand_over(holder, "deploy")
    assert status(store, "b") is Status.QUEUED, "offered to the first in line"
    advance(store, 1)
    assert isinstance(attempt(store, "late"), Refused), "the place is free, and not for this one"
    assert isinstance(attempt(store, "a"), Holder), "it wanted a place before the others did"
    assert isinstance(attempt(store, "b"), Refused)
    assert line(store) == ["b", "late"]


def test_who_is_offered_a_place_and_does_not_come_keeps_it_from_the_others_for_a_minute_only(store: Store) -> None:
    """Its queue has no workers, say."""
    keyed(store, "a", "b", "c")
    holder = claim(store, "a")
    for task_id in ("b", "c"):
        attempt(store, task_id)
        advance(store, 1)
    store.finish(holder, Status.SUCCEEDED, reason="r")
    sweeper = sweeper_of(store)
    sweeper.sweep_once()
    assert (status(store, "b"), status(store, "c")) == (Status.QUEUED, Status.PARKED)
    advance(store, UNCLAIMED_MS / 1000)
    sweeper.sweep_once()
    assert status(store, "c") is Status.QUEUED
    held = claim(store, "c")
    assert isinstance(attempt(store, "b"), Refused)
    keyed(store, "d")
    attempt(store, "d")
    assert line(store) == ["b", "d"], "its turn is still the one it had"
    store.finish(held, Status.SUCCEEDED, reason="r")


def test_a_place_whose_holder_vanished_is_given_away_by_a_sweep_and_that_of_one_who_runs_is_not(store: Store) -> None:
    """The task's keys were deleted by hand, or an older Baton that knows no places took it away."""
    keyed(store, "a", "b", "c", places=2)
    claim(store, "a")
    store.client.sadd(store.keys.slots(KEY), "vanished")
    assert isinstance(attempt(store, "b"), Refused)
    report = sweeper_of(store).sweep_once()
    assert report.woken == ["b"]
    assert holders(store) == {"a"}
    claim(store, "b")
    assert isinstance(attempt(store, "c"), Refused)
    assert sweeper_of(store).sweep_once().woken == []


def test_a_place_freed_by_a_process_that_died_right_after_it_is_offered_by_a_sweep(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed(store, "a", "b")
    holder = claim(store, "a")
    attempt(store, "b")
    with monkeypatch.context() as patch:
        patch.setattr(Slots, "_freed", lambda self, key: None)
        store.finish(holder, Status.SUCCEEDED, reason="r")
    assert status(store, "b") is Status.PARKED
    assert sweeper_of(store).sweep_once().woken == ["b"]
    claim(store, "b")
    sweeper_of(store).sweep_once()
    assert not store.client.exists(store.keys.slots_wanted()), "nobody waits, so no sweep has to look"


def test_who_leaves_the_line_keeps_nobody_waiting(store: Store) -> None:
    keyed(store, "a", "b", "c")
    holder = claim(store, "a")
    attempt(store, "b")
    attempt(store, "c")
    store.cancel("b", by="ann")
    store.client.delete(*store.keys.of_task("c"))  # evicted
    store.client.zrem(store.keys.index("parked"), "c")
    keyed(store, "d")
    attempt(store, "d")
    store.finish(holder, Status.SUCCEEDED, reason="r")
    assert status(store, "d") is Status.QUEUED
    assert line(store) == ["d"]


def test_a_task_whose_deadline_passed_ends_at_its_claim_and_needs_no_place(store: Store) -> None:
    store.create(new_task("a", concurrency_key=KEY, concurrency=1))
    store.create(new_task("b", concurrency_key=KEY, concurrency=1, deadline_ms=60_000))
    claim(store, "a")
    assert isinstance(attempt(store, "b"), Refused)
    wakes = number(store, "wakeAtMs", "b")
    assert wakes == number(store, "deadlineMs", "b") == number(store, "createdAtMs", "b") + 60_000
    advance(store, 60)
    assert sweeper_of(store).sweep_once().woken == ["b"]
    refused = attempt(store, "b")
    assert isinstance(refused, Refused)
    assert refused.ended
    assert status(store, "b") is Status.FAILED
    assert field(store, "reason", "b").startswith("limit: deadline ")
    assert line(store) == []


@pytest.mark.server
def test_of_many_who_claim_at_once_as_many_run_as_there_are_places(valkey_store: Store, redis_url: str) -> None:
    ids = [f"t{n}" for n in range(24)]
    keyed(valkey_store, *ids, places=5)

    def one(task_id: str) -> bool:
        with connect(redis_url) as client:
            return isinstance(make_store(client).claim(task_id, 1, OWNER), Holder)

    for task_id in ids:
        pop(valkey_store.client, f"{task_id}-1")
    with ThreadPoolExecutor(12) as pool:
        assert sum(pool.map(one, ids)) == 5
    assert len(line(valkey_store)) == 19


@pytest.mark.server
def test_control_a_task_without_a_key_pays_nothing_for_places(valkey_store: Store) -> None:
    valkey_store.create(new_task())
    with monitored(valkey_store.client) as seen:
        valkey_store.finish(claim(valkey_store), Status.SUCCEEDED, reason="r")
    assert not [words for words in seen.commands if any("slots" in word for word in words)]
    assert len([words for words in seen.commands if words[0] == "WATCH"]) == 2
