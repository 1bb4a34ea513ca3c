"""What a holder had reserved when it died or let go is settled once, by whoever comes to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import redis

from tests.state.fair_share import DAY_MS, answered, begun, counted, held, one
from tests.state.faults import Fault, Plan, faulty
from tests.state.kit import FIRST, REQUEST, T, field, lapse, make_store
from worker.errors import LeaseLost
from worker.state.budget import reserved_field
from worker.state.lease import Holder
from worker.state.store import Store
from worker.state.task import Status

LETTING_GO: dict[str, Callable[[Store, Holder], Any]] = {
    "park": lambda s, h: s.park(h, "waits", wait_ms=None),
    "hand_over": lambda s, h: s.hand_over(h, "drain", abandoned=h.calling),
    "finish": lambda s, h: s.finish(h, Status.FAILED, reason="r"),
}


@pytest.mark.parametrize("calling", [True, False], ids=["call-abandoned", "never-called"])
@pytest.mark.parametrize("way", LETTING_GO)
def test_what_is_reserved_is_charged_if_the_call_has_begun_and_else_given_back(
    store: Store, way: str, calling: bool
) -> None:
    store.set_budget("fleet", 1_000, 0)
    holder = begun(store)
    holder.calling = calling
    LETTING_GO[way](store, holder)
    assert counted(store) == (100 if calling else 0, 0)


@pytest.mark.parametrize("ends", [False, True], ids=["goes-on", "cancelled"])
def test_what_a_dead_holder_had_reserved_is_charged_once(store: Store, ends: bool) -> None:
    """That answer may have to be paid for."""
    store.set_budget("fleet", 1_000, 0)
    store.set_budget("tag=a", 500, DAY_MS)
    dead = begun(store, tags=("a",))
    if ends:
        store.cancel(T, by="ann")
    lapse(store)
    assert store.recover(T, proof="p") is (Status.CANCELLED if ends else Status.QUEUED)
    assert (counted(store), counted(store, "tag=a")) == ((100, 0), (100, 0))
    if not ends:
        holder = held(store)
        store.reserve(holder, 50, 0)
        assert counted(store) == (100, 50)
        with pytest.raises(LeaseLost):  # it was only asleep, and its answer comes
            answered(store, dead)
        answered(store, holder, tokens=20)
    assert counted(store) == (100 if ends else 120, 0)


def test_what_an_older_baton_left_reserved_is_charged_by_the_next_holder(store: Store) -> None:
    """A fleet is deployed worker by worker: the one that recovers may not know of budgets."""
    store.set_budget("fleet", 1_000, 0)
    begun(store)
    left = field(store, "budgetOpen")
    lapse(store)
    store.recover(T, proof="p")
    store.client.hset(store.keys.task(T), "budgetOpen", left)
    store.client.hset(store.keys.budget("fleet"), mapping={reserved_field(one(store).born): 100, "used:0": 0})
    holder = held(store)
    assert not holder.covered
    store.reserve(holder, 50, 0)
    assert counted(store) == (100, 50)
    answered(store, holder, tokens=20)
    assert counted(store) == (120, 0)


@pytest.mark.server
@pytest.mark.parametrize("verb", ["begin", "save_response", "reserve", "recover", "park"])
def test_a_lost_reply_counts_nothing_twice(valkey_store: Store, redis_url: str, verb: str) -> None:
    store = valkey_store
    store.set_budget("fleet", 1_000, 0)
    holder = held(store) if verb in ("begin", "reserve") else begun(store)
    holder.calling = True
    if verb == "recover":
        lapse(store)
    with faulty(redis_url, plan := Plan(Fault.LOST, 1, execs_only=True)) as client:
        unlucky = make_store(client, clock=store.clock)
        match verb:
            case "begin":
                unlucky.begin(holder, REQUEST, FIRST, needs=100)
                assert not holder.covered, "whether it was granted was not heard"
                unlucky.reserve(holder, 80, 0)
            case "save_response":
                answered(unlucky, holder, tokens=30)
            case "reserve":
                unlucky.reserve(holder, 80, 0)
            case "recover":
                unlucky.recover(T, proof="p")
            case "park":
                unlucky.park(holder, "waits", wait_ms=None)
    assert plan.fired == 1
    expected = {"begin": (0, 80), "save_response": (30, 0), "reserve": (0, 80), "recover": (100, 0), "park": (100, 0)}
    assert counted(store) == expected[verb]


@pytest.mark.server
def test_a_holder_that_dies_right_after_its_answer_was_saved_has_paid_for_that_answer(
    valkey_store: Store, redis_url: str
) -> None:
    """Settled in the very commit, or a death after it would charge the estimate instead."""
    store = valkey_store
    store.set_budget("fleet", 1_000, 0)
    holder = begun(store)
    plan = Plan(Fault.UNSENT, at=2, times=100, execs_only=True)
    with faulty(redis_url, plan) as client, suppress(redis.ConnectionError):
        answered(make_store(client, clock=store.clock), holder, tokens=30)
    lapse(store)
    store.recover(T, proof="p")
    assert counted(store) == (30, 0)
