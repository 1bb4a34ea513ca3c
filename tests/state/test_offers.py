"""Offering places and budgets to those who wait: in their order, to all of them, and whatever one of them is like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fakeredis
import pytest

from tests.state.fair_share import KEY, answered, attempt, begun, counted, held, keyed, line, one, wait_for
from tests.state.kit import advance, claim, jobs, make_store, new_task, status, sweeper_of
from worker.state import budgeted, slots
from worker.state.budget import Purse
from worker.state.lease import Holder
from worker.state.slots import UNCLAIMED_MS
from worker.state.standing import Refused
from worker.state.store import Store
from worker.state.task import ParkNote, Status


def test_who_is_first_in_line_comes_first_when_several_places_are_free(store: Store) -> None:
    """Else one that asks for few places at once would be passed by those behind it, time and again."""
    keyed(store, "a", "b", places=2)
    first, second = claim(store, "a"), claim(store, "b")
    keyed(store, "few")
    keyed(store, "c", "d", places=2)
    for task_id in ("few", "c", "d"):
        assert isinstance(attempt(store, task_id), Refused)
        advance(store, 1)
    store.finish(first, Status.SUCCEEDED, reason="r")
    store.finish(second, Status.SUCCEEDED, reason="r")
    assert jobs(store.client) == ["few-2", "c-2"], "and d's turn has not come"
    assert isinstance(attempt(store, "few"), Holder)


@pytest.mark.parametrize("how", ["a number that is none", "a record that is none", "another field"])
def test_a_damaged_task_in_line_keeps_nobody_from_a_place_and_its_holder_from_nothing(how: str) -> None:
    store = make_store(fakeredis.FakeRedis())
    keyed(store, "a", "damaged", "c")
    holder = claim(store, "a")
    attempt(store, "damaged")
    advance(store, 1)
    attempt(store, "c")
    if how == "a record that is none":
        store.client.delete(store.keys.task("damaged"))
        store.client.set(store.keys.task("damaged"), "x")
    else:
        name = "concurrency" if how == "a number that is none" else "crashes"
        store.client.hset(store.keys.task("damaged"), name, "x")
    store.finish(holder, Status.SUCCEEDED, reason="r")  # which wakes those in line
    report = sweeper_of(store).sweep_once()
    assert status(store, "c") is Status.QUEUED
    assert report.problems == {}
    assert line(store) == ["c"]


def test_who_is_lined_up_again_while_it_is_struck_off_keeps_its_turn(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed(store, "a", "b")
    holder = claim(store, "a")
    attempt(store, "b")
    store.finish(holder, Status.SUCCEEDED, reason="r")  # wakes b, which does not come
    advance(store, UNCLAIMED_MS / 1000)
    keyed(store, "c")
    looked = store._of_each

    def look_then_wait(ids: list[str]) -> list[object]:
        found = looked(ids)
        store.client.sadd(store.keys.slots(KEY), "another")  # so that b finds the place taken
        attempt(store, "b")
        return found

    monkeypatch.setattr(store, "_of_each", look_then_wait)
    store._offer(KEY)
    assert status(store, "b") is Status.PARKED
    assert line(store) == ["b"]
    store.client.srem(store.keys.slots(KEY), "another")
    monkeypatch.undo()
    assert sweeper_of(store).sweep_once().woken == ["b"]


def test_a_sweep_looks_at_so_many_keys_at_most_and_comes_to_all_of_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "KEYS_MAX", 2)
    asked: list[str] = []
    monkeypatch.setattr(store, "_offer", lambda key: asked.append(key) or [])
    for number in range(4):
        keyed(store, f"a{number}", f"b{number}", key=f"k{number}")
        claim(store, f"a{number}")
        attempt(store, f"b{number}")
    for sweeps in range(1, 100):
        store.offer_places()
        assert len(asked) == 2 * sweeps
        if len(set(asked)) == 4:
            break
    assert len(set(asked)) == 4


def test_a_long_line_does_not_look_for_itself_all_at_once(store: Store) -> None:
    keyed(store, *(f"t{number}" for number in range(12)))
    claim(store, "t0")
    for number in range(1, 12):
        attempt(store, f"t{number}")
    due = [score for _, score in store.client.zrange(store.keys.index("parked"), 0, -1, withscores=True)]
    assert max(due) - min(due) > 60_000


def test_raising_a_limit_wakes_all_that_wait_whatever_else_is_still_listed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Striking off those that were cancelled moves the others up."""
    monkeypatch.setattr(budgeted, "BATCH", 3)
    store.set_budget("fleet", 10, 0)
    ids = [f"t{number}" for number in range(8)]
    for task_id in ids:
        wait_for(store, held(store, task_id), 100)
        advance(store, 1)
    for task_id in ids[:2]:
        store.cancel(task_id, by="ann")
    assert store.set_budget("fleet", 300, 0) == ids[2:5], "there is room for three, of whatever batch"
    assert store.set_budget("fleet", 600, 0) == ids[5:]


def test_room_for_one_wakes_one_however_long_it_takes_to_come(store: Store) -> None:
    """The queue is long, say: each sweep would wake one more, for nothing."""
    store.set_budget("fleet", 10, 0)
    for task_id in ("a", "b", "c"):
        wait_for(store, held(store, task_id), 100)
        advance(store, 1)
    assert store.set_budget("fleet", 100, 0) == ["a"]
    assert store.set_budget("fleet", 199, 0) == []
    sweeper = sweeper_of(store)
    assert sweeper.sweep_once().woken == []
    advance(store, UNCLAIMED_MS / 1000)
    assert sweeper.sweep_once().woken == ["b"], "a does not come"
    store.reserve(held(store, "b"), 100, 0)
    store.finish(begun(store, "d", needs=0), Status.SUCCEEDED, reason="r")
    assert sweeper.sweep_once().woken == []


@pytest.mark.parametrize("change", ["another period", "taken away and made again"])
def test_a_budget_made_anew_in_the_moment_of_a_commit_has_nothing_reserved_in_it(
    store: Store, another: Callable[[], Store], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Else it would be short of that for ever, or have that much too much."""
    rival, periods = another(), iter([3_600_000, 7_200_000])
    store.set_budget("fleet", 1_000, 0)

    def anew() -> None:
        if change == "taken away and made again":
            rival.clear_budget("fleet")
        rival.set_budget("fleet", 1_000, next(periods))

    def first(write: Any) -> Any:
        return lambda *args: (anew(), write(*args))[1]

    holder = begun(store, needs=100)
    with monkeypatch.context() as patch:
        patch.setattr(Purse, "close", first(Purse.close))
        answered(store, holder, tokens=30)
    assert counted(store)[1] == 0
    with monkeypatch.context() as patch:
        patch.setattr(Purse, "reserve", first(Purse.reserve))
        other = begun(store, "other", needs=100)
    assert one(store).left >= 970
    store.finish(other, Status.SUCCEEDED, reason="r")
    budget = one(store)
    assert (budget.reserved, budget.left) == (0, 1_000 - budget.used)


def test_a_damaged_task_keeps_nobody_from_a_budget() -> None:
    store = make_store(fakeredis.FakeRedis())
    store.set_budget("fleet", 10, 0)
    for task_id in ("number", "record", "fine"):
        wait_for(store, held(store, task_id), 100)
    store.client.hset(store.keys.task("number"), "budgetNeeds", "x")
    store.client.delete(store.keys.task("record"))
    store.client.set(store.keys.task("record"), "x")
    assert "fine" in store.set_budget("fleet", 200, 0)


def test_control_who_waits_for_something_else_is_not_woken_for_a_place_or_a_budget(store: Store) -> None:
    store.create(new_task("a", concurrency_key=KEY, concurrency=1))
    store.park(claim(store, "a"), "waits", wait_ms=None, note=ParkNote(waits_for="api"))
    assert sweeper_of(store).sweep_once().woken == []
