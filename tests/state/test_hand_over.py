"""A task handed over in the middle of a call: what the next holder may believe of that call."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.state.kit import CALL, T, at_a, claim, field, marked, number, status
from worker.state.lease import Holder
from worker.state.ledger import Marker
from worker.state.load import load
from worker.state.store import Store
from worker.state.task import Status

LetsGo = Callable[[Store, Holder], object]

LEAVES_A_LIVE_PROCESS: dict[str, LetsGo] = {
    "hand_over": lambda store, holder: store.hand_over(holder, "drain", midway=True),
    "recover": lambda store, holder: store.recover(T, proof="drain", fence=holder.fence, drained=True, midway=True),
    "park": lambda store, holder: store.park(holder, "hangs", wait_ms=0, midway=True),
}
LEAVES_NOBODY: dict[str, LetsGo] = {
    "hand_over": lambda store, holder: store.hand_over(holder, "drain"),
    "recover": lambda store, holder: store.recover(T, proof="killed to drain", fence=holder.fence, drained=True),
}


def marker_seen_by_the_next(store: Store) -> Marker | None:
    if status(store) is Status.PARKED:
        store.wake(T)
    loaded = load(store.client, store.keys, store.probe, claim(store))
    return loaded.calls.markers.get(CALL.id)


@pytest.mark.parametrize("how", LEAVES_A_LIVE_PROCESS)
def test_after_a_call_that_may_still_be_going_on_its_process_is_not_taken_for_dead(store: Store, how: str) -> None:
    """Else `verify` would be believed when it says "not happened", a moment before it happens."""
    LEAVES_A_LIVE_PROCESS[how](store, marked(store))
    marker = marker_seen_by_the_next(store)
    assert marker is not None
    assert not marker.holder_gone
    assert number(store, "crashes") == 0


@pytest.mark.parametrize("how", LEAVES_NOBODY)
def test_control_after_a_process_that_ended_it_is(store: Store, how: str) -> None:
    LEAVES_NOBODY[how](store, marked(store))
    marker = marker_seen_by_the_next(store)
    assert marker is not None
    assert marker.holder_gone
    assert (number(store, "crashes"), number(store, "handOvers")) == (0, 1)


def test_a_call_that_says_it_did_nothing_is_as_if_it_had_never_started(store: Store) -> None:
    store.hand_over(marked(store), "drain", undone=CALL)
    assert marker_seen_by_the_next(store) is None
    assert field(store, "openCall") == ""


def test_a_model_call_that_was_given_up_is_counted(store: Store) -> None:
    store.hand_over(at_a(store), "drain", abandoned=True)
    store.hand_over(claim(store), "drain")
    assert (number(store, "abandonedCalls"), number(store, "handOvers")) == (1, 2)
