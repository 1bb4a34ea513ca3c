"""The table in store.py's docstring: each verb from each state, and that a refusal writes nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.state.kit import (
    AT_A,
    AT_B,
    CALL,
    FIRST,
    OWNER,
    REQUEST,
    STATES,
    T,
    at_a,
    claim,
    counters,
    entry_for,
    indexes_of,
    kinds,
    lapse,
    new_task,
    nothing_written,
    number,
    status,
)
from worker.errors import LeaseLost, TaskNotFound, WrongState
from worker.state.lease import Holder
from worker.state.standing import Refused
from worker.state.store import Store
from worker.state.task import Created, Status

RAISES = "raises"

# verb → how to call it, the states it acts on with the state after, and how it says no elsewhere.
PEOPLE_AND_SWEEPERS: dict[str, tuple[Callable[[Store], Any], dict[str, str], Callable[[Any], bool] | str]] = {
    "create": (lambda s: s.create(new_task()), {"absent": "queued"}, lambda r: r == Created(T, existed=True)),
    "claim": (
        lambda s: s.claim(T, max(number(s, "delivery"), 1), OWNER),
        {"queued": "running"},
        lambda r: isinstance(r, Refused),
    ),
    "cancel": (
        lambda s: s.cancel(T, by="ann"),
        {"queued": "cancelled", "parked": "cancelled", "running": "running"},
        RAISES,
    ),
    "retry": (
        lambda s: s.retry(T, by="ann"),
        {"failed": "queued", "dead": "queued", "cancelled": "queued"},
        RAISES,
    ),
    "wake": (lambda s: s.wake(T), {"parked": "queued"}, lambda r: r is False),
    "redeliver": (lambda s: s.redeliver(T, number(s, "delivery")), {"queued": "queued"}, lambda r: r is False),
    "recover": (lambda s: (lapse(s), s.recover(T, proof="p"))[1], {"running": "queued"}, lambda r: r is None),
}

HOLDERS: dict[str, Callable[[Store, Holder], None]] = {
    "begin": lambda s, h: s.begin(h, REQUEST, FIRST),
    "save_response": lambda s, h: s.save_response(h, AT_A.messages[-1], AT_A),
    "mark_started": lambda s, h: s.mark_started(h, CALL),
    "record_result": lambda s, h: s.record_result(h, CALL, entry_for(CALL)),
    "save_results": lambda s, h: s.save_results(h, AT_B.messages[-1], AT_B),
    "renew": lambda s, h: s.renew(h),
    "finish": lambda s, h: s.finish(h, Status.SUCCEEDED, reason="end_turn"),
    "park": lambda s, h: s.park(h, "waits", wait_ms=1),
    "hand_over": lambda s, h: s.hand_over(h, "drain"),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("verb", PEOPLE_AND_SWEEPERS)
def test_a_verb_acts_on_its_states_and_leaves_all_others_as_they_are(store: Store, verb: str, state: str) -> None:
    act, to, says_no = PEOPLE_AND_SWEEPERS[verb]
    STATES[state](store)
    if state in to:
        act(store)
        assert status(store) == to[state]
        assert indexes_of(store) == [Status(to[state]).listed_in]
        return
    with nothing_written(store.client):
        if verb == "cancel" and state == "cancelled":  # asked twice, cancelled once: nothing to complain about
            assert act(store) is Status.CANCELLED
        elif says_no == RAISES:
            with pytest.raises((WrongState, TaskNotFound)) as refused:
                act(store)
            assert isinstance(refused.value, TaskNotFound) == (state == "absent")
        else:
            assert callable(says_no)
            assert says_no(act(store))


@pytest.mark.parametrize("state", [state for state in STATES if state not in ("absent", "running", "queued")])
@pytest.mark.parametrize("verb", HOLDERS)
def test_whoever_let_go_of_a_task_can_write_nothing_more(store: Store, verb: str, state: str) -> None:
    """The holder object of the ended ownership, asked to go on by mistake."""
    holder = STATES[state](store)
    with nothing_written(store.client), pytest.raises(LeaseLost):
        HOLDERS[verb](store, holder)


@pytest.mark.parametrize("newcomer", ["nobody yet", "a new holder", "a new holder at the same seq"])
@pytest.mark.parametrize("verb", HOLDERS)
def test_a_holder_that_was_taken_over_can_write_nothing(
    store: Store, another: Callable[..., Store], verb: str, newcomer: str
) -> None:
    """A process slept past its lease (SIGSTOP, a frozen VM), wakes up, and goes on where it was (D04)."""
    sleeper = at_a(store)
    lapse(store)
    assert store.recover(T, proof="its lease ran out") is Status.QUEUED
    if newcomer != "nobody yet":
        new = claim(store)
        new.seq = sleeper.seq  # as `load` sets it
        if newcomer == "a new holder":
            store.mark_started(new, CALL)
    with nothing_written(store.client):
        with pytest.raises(LeaseLost):
            HOLDERS[verb](another(), sleeper)
        assert sleeper.stop.is_set(), "its running tool is told to stop, too"


@pytest.mark.parametrize("verb", HOLDERS)
def test_control_a_live_holder_may_use_each_of_its_verbs(store: Store, verb: str) -> None:
    holder = at_a(store)
    HOLDERS[verb](store, holder)
    assert status(store) is {
        "finish": Status.SUCCEEDED, "park": Status.PARKED, "hand_over": Status.QUEUED,
    }.get(verb, Status.RUNNING)  # fmt: skip


def test_what_happened_is_told_once_each_and_counted(store: Store) -> None:
    """The whole life of a task: its stream has every step, the fleet's feed the lifecycle without a word of text."""
    holder = STATES["queued"](store)
    holder = claim(store)
    store.begin(holder, REQUEST, FIRST)
    store.save_response(holder, AT_A.messages[-1], AT_A)
    store.mark_started(holder, CALL)
    store.record_result(holder, CALL, entry_for(CALL, "the result"))
    store.save_results(holder, AT_B.messages[-1], AT_B)
    store.park(holder, "waits", wait_ms=None)
    store.wake(T)
    store.redeliver(T, 2)
    holder = claim(store)
    store.hand_over(holder, "drain")
    holder = claim(store)
    lapse(store)
    store.recover(T, proof="p")
    store.cancel(T, by="ann")
    store.retry(T, by="ann")
    lifecycle = [
        "created", "claimed", "parked", "woken", "redelivered", "claimed", "handed-over", "claimed", "recovered",
        "ended", "retried",
    ]  # fmt: skip
    progress = ["responded", "call-started", "call-recorded", "answered"]
    assert kinds(store) == [*lifecycle[:2], *progress, *lifecycle[2:]]
    feed = store.client.xrange(store.keys.feed())
    assert [fields[b"type"].decode() for _, fields in feed] == lifecycle
    assert not any(b"hello" in value or b"result" in value for _, fields in feed for value in fields.values())
    assert counters(store) == {
        "created": 1, "claimed": 3, "parked": 1, "woken": 1, "redelivered": 1, "handed-over": 1, "recovered": 1,
        "cancelled": 1, "retried": 1,
    }  # fmt: skip
