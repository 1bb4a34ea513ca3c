"""Budgets: what is reserved before a model call is settled once, by whoever comes to it, and a limit holds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.state.fair_share import DAY_MS, answered, begun, counted, held, one, wait_for
from tests.state.kit import (
    AT_B,
    CALL,
    FIRST,
    REQUEST,
    T,
    advance,
    after_response,
    entry_for,
    field,
    make_store,
    monitored,
    number,
    sweeper_of,
    use,
)
from worker.errors import MustWait
from worker.state.lease import Holder
from worker.state.store import Store
from worker.state.task import Status
from worker.state.transact import connect

# -- reserve and settle ----------------------------------------------------------------------------------------------


def test_tokens_are_reserved_and_settled_along_with_the_commits(store: Store) -> None:
    store.set_budget("fleet", 1_000, 0)
    holder = begun(store, needs=100)
    assert (holder.covered, counted(store)) == (True, (0, 100))
    answered(store, holder, tokens=30)
    assert (holder.covered, counted(store)) == (False, (30, 0))
    store.mark_started(holder, CALL)
    store.record_result(holder, CALL, entry_for(CALL))
    store.save_results(holder, AT_B.messages[-1], AT_B, needs=200)
    assert (holder.covered, counted(store)) == (True, (30, 200))
    store.save_response(holder, None, after_response(AT_B, use("toolu_2")), tokens=500)
    assert counted(store) == (530, 0), "what it really was, however little was reserved"
    store.finish(holder, Status.FAILED, reason="r")


def test_without_room_the_task_waits_with_a_reason_and_goes_on_when_the_limit_is_raised(store: Store) -> None:
    store.set_budget("tag=a", 150, 0)
    holder = begun(store, needs=100, tags=("a", "b"))
    second = begun(store, "t2", needs=100, tags=("a",))
    control = begun(store, "t3", needs=100, tags=("b",))
    assert (holder.covered, second.covered, control.covered) == (True, False, True)
    wait = wait_for(store, second, 100)
    assert (wait.wait_s, wait.waits_for) == (None, "budget:tag=a")
    assert "0 of 150 tokens are used and 100 reserved, this call needs about 100" in field(store, "reason", "t2")
    assert "`baton budget set tag=a tokens=N`" in field(store, "reason", "t2")
    assert store.waiting_for_budgets() == {"t2": ("tag=a", 100, False)}
    assert counted(store, "tag=a") == (0, 100)

    assert sweeper_of(store).sweep_once().woken == []
    assert store.set_budget("tag=a", 199, 0) == [], "there is still no room"
    assert store.set_budget("tag=a", 200, 0) == ["t2"]
    again = held(store, "t2")
    store.reserve(again, 100, 0)
    assert (again.covered, counted(store, "tag=a")) == (True, (0, 200))
    assert store.waiting_for_budgets() == {}
    for one_of in (holder, again, control):
        store.finish(one_of, Status.SUCCEEDED, reason="r")


def test_room_that_others_did_not_use_is_offered_by_a_sweep(store: Store) -> None:
    store.set_budget("fleet", 150, 0)
    holder, other = begun(store, needs=100), begun(store, "t2", needs=100)
    wait_for(store, other, 100)
    answered(store, holder, tokens=10)
    assert sweeper_of(store).sweep_once().woken == ["t2"]


def test_a_budget_begins_anew_with_each_period_and_those_who_wait_are_due_then(store: Store) -> None:
    store.set_budget("fleet", 100, DAY_MS)
    holder = begun(store, needs=100)
    answered(store, holder, tokens=90)
    other = held(store, "t2")
    wait = wait_for(store, other, 50)
    anew = one(store).anew_ms
    assert anew is not None
    assert wait.wait_s is not None
    assert anew <= number(store, "wakeAtMs", "t2") <= anew + 60_000
    advance(store, wait.wait_s)
    assert sweeper_of(store).sweep_once().woken == ["t2"]
    again = held(store, "t2")
    store.reserve(again, 50, 0)
    assert counted(store) == (0, 50)
    answered(store, again, tokens=40)
    names = store.client.hkeys(store.keys.budget("fleet"))
    assert len([name for name in names if name.startswith(b"used:")]) == 1, "the day before is no longer kept"
    too_much = held(store, "t3")
    assert wait_for(store, too_much, 101).wait_s is None, "no day has room for this one"


def test_a_budget_that_is_made_meanwhile_is_noticed_before_the_next_call(store: Store) -> None:
    holder = begun(store)
    assert holder.covered
    answered(store, holder)
    store.set_budget("fleet", 100, 0)
    store.mark_started(holder, CALL)
    store.record_result(holder, CALL, entry_for(CALL))
    store.save_results(holder, AT_B.messages[-1], AT_B, needs=60)
    assert not holder.covered
    store.reserve(holder, 60, 1)
    assert (holder.covered, counted(store)) == (True, (0, 60))
    assert store.clear_budget("fleet") == []
    store.set_budget("fleet", 100, 0)  # another one by the same name: nothing is reserved in it
    store.save_response(holder, None, after_response(AT_B, use("toolu_2")), tokens=7)
    assert counted(store) == (7, 0)


def test_those_who_wait_go_on_when_the_budget_is_taken_away(store: Store) -> None:
    store.set_budget("fleet", 10, 0)
    wait_for(store, held(store), 100)
    assert store.clear_budget("fleet") == [T]
    assert store.clear_budget("fleet") is None
    begun(store)


# -- many at once ----------------------------------------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.parametrize("along", [True, False], ids=["along-with-the-commit", "by-itself"])
def test_of_many_that_reserve_at_once_as_many_are_granted_as_there_is_room_for(
    valkey_store: Store, redis_url: str, along: bool
) -> None:
    store = valkey_store
    store.set_budget("fleet", 549, 0)
    holders = [held(store, f"t{n}") for n in range(24)]

    def reserve(holder: Holder) -> bool:
        with connect(redis_url) as client:
            mine = make_store(client, clock=store.clock)
            if along:
                mine.begin(holder, REQUEST, FIRST, needs=100)
            with suppress(MustWait):
                if not holder.covered or not along:
                    mine.reserve(holder, 100, 0)
            return holder.granted

    with ThreadPoolExecutor(12) as pool:
        assert sum(pool.map(reserve, holders)) == 5
    assert counted(store) == (0, 500)


def test_a_grant_that_came_after_the_room_was_taken_is_none(store: Store, another: Callable[[], Store]) -> None:
    """Between the look at a budget and the commit that reserves along with it somebody else takes the room."""
    other, holder = raced(store, another)
    store.begin(holder, REQUEST, FIRST, needs=100)
    assert (other.covered, holder.covered) == (True, False)
    wait_for(store, holder, 100)
    assert counted(store) == (0, 100)


def test_room_that_is_taken_while_it_is_looked_at_is_given_once(store: Store, another: Callable[[], Store]) -> None:
    other, holder = raced(store, another)
    wait_for(store, holder, 100)
    assert (other.covered, counted(store)) == (True, (0, 100))


def raced(store: Store, another: Callable[[], Store]) -> tuple[Holder, Holder]:
    """Two holders and room for one: the first reserves just before the second one's EXEC."""
    store.set_budget("fleet", 150, 0)
    other, holder = held(store, "t2"), held(store)
    reserve, done = store.purse.reserve, []

    class Slow(type(store.purse)):  # type: ignore[misc]
        def reserve(self, pipe: Any, *args: Any) -> None:
            if not done:
                done.append(another().begin(other, REQUEST, FIRST, needs=100))
            reserve(pipe, *args)

    store.purse = Slow(store.keys)
    return other, holder


@pytest.mark.server
def test_control_a_task_without_a_budget_pays_one_command_in_a_read_it_makes_anyway(valkey_store: Store) -> None:
    with monitored(valkey_store.client) as seen:
        holder = begun(valkey_store)
        answered(valkey_store, holder)
        assert holder.covered or not holder.scopes
        valkey_store.finish(holder, Status.FAILED, reason="r")
    touching = [words[0] for words in seen.commands if any(word.startswith("baton:budget") for word in words[1:])]
    assert touching == ["SMEMBERS", "SMISMEMBER"]
    assert len([words for words in seen.commands if words[0] == "WATCH"]) == 5  # create, claim, begin, A, finish
