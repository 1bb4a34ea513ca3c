"""Cancel, retry, crashes and expiry: how a task ends, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.state.kit import (
    AT_A,
    AT_B,
    T,
    at_a,
    claim,
    dead,
    dump,
    ended,
    field,
    jobs,
    kinds,
    lapse,
    queued,
    status,
)
from worker.errors import CancelRequested, TaskNotFound
from worker.state.lease import Holder
from worker.state.load import load
from worker.state.store import Store
from worker.state.task import Status


def after_own_look(store: Store, writer: str, act: Callable[[], object]) -> list[int]:
    """Run `act` once between the reads and the EXEC of the verb that uses `store.writes.<writer>`."""
    original, calls = getattr(store.writes, writer), []

    def hooked(*args: object, **kwargs: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            act()
        original(*args, **kwargs)

    object.__setattr__(store.writes, writer, hooked)  # a frozen dataclass
    return calls


# -- cancel --------------------------------------------------------------------------------------------------------


def test_cancelling_a_queued_task_takes_its_job_off_the_list(store: Store) -> None:
    queued(store)
    assert store.cancel(T, by="ann") is Status.QUEUED
    assert (status(store), jobs(store.client), field(store, "reason")) == (Status.CANCELLED, [], "ann")
    assert not store.client.exists(f"rq:job:{T}-1")


def test_cancelling_a_running_task_asks_its_holder(store: Store) -> None:
    """Everything the holder does next tells it; none of it is refused, so that it can leave a valid history."""
    holder = at_a(store)
    assert store.cancel(T, by="ann") is Status.RUNNING
    assert status(store) is Status.RUNNING
    assert holder.cancel is None
    store.renew(holder)
    assert holder.cancel == "ann"
    with pytest.raises(CancelRequested, match="ann"):
        holder.watch()
    store.save_results(holder, AT_B.messages[-1], AT_B)
    store.finish(holder, Status.CANCELLED, reason="ann")
    assert status(store) is Status.CANCELLED


def test_a_commit_learns_of_a_cancel_too(store: Store) -> None:
    holder = at_a(store)
    store.cancel(T, by="ann")
    store.save_results(holder, AT_B.messages[-1], AT_B)
    assert holder.cancel == "ann"


def test_a_pending_cancel_is_asked_once(store: Store) -> None:
    at_a(store)
    store.cancel(T, by="ann")
    store.cancel(T, by="bob")
    assert kinds(store).count("cancel-asked") == 1
    assert store.client.hget(store.keys.control(T), "cancel") == b"ann"


@pytest.mark.parametrize("verb", ["park", "hand_over"])
def test_a_task_with_a_pending_cancel_is_never_put_aside(store: Store, verb: str) -> None:
    """It would wait, parked or queued, for somebody to notice what a person asked for."""
    holder = at_a(store)
    store.cancel(T, by="ann")
    with pytest.raises(CancelRequested):
        put_aside(store, holder, verb)
    assert status(store) is Status.RUNNING
    store.finish(holder, Status.CANCELLED, reason="ann")


@pytest.mark.parametrize("verb", ["park", "hand_over"])
def test_a_cancel_that_comes_between_look_and_write_comes_first(
    store: Store, another: Callable[..., Store], verb: str
) -> None:
    """The race itself: the holder has seen no cancel, and its EXEC must not go through any more."""
    holder, person = at_a(store), another()
    writer = {"park": "park", "hand_over": "queue"}[verb]
    after_own_look(store, writer, lambda: person.cancel(T, by="ann"))
    with pytest.raises(CancelRequested):
        put_aside(store, holder, verb)
    assert status(store) is Status.RUNNING


@pytest.mark.parametrize("verb", ["park", "hand_over", "recover", "claim"])
def test_whoever_gets_there_first_no_cancel_is_left_lying_about(
    store: Store, another: Callable[..., Store], verb: str
) -> None:
    """The other half of the race: the cancel has seen "running" (or "queued"), and the task moves on."""
    holder, mover = (None if verb == "claim" else at_a(store)), another()
    if holder is None:
        queued(store)
    moves = {
        "park": lambda: mover.park(holder, "waits", wait_ms=None),
        "hand_over": lambda: mover.hand_over(holder, "drain"),
        "recover": lambda: (lapse(store), mover.recover(T, proof="p")),
        "claim": lambda: claim(mover),
    }
    after_own_look(store, "end" if verb == "claim" else "tell", moves[verb])
    was = store.cancel(T, by="ann")
    expected = {"park": Status.PARKED, "hand_over": Status.QUEUED, "recover": Status.QUEUED, "claim": Status.RUNNING}
    assert was is expected[verb]
    assert status(store) is (Status.RUNNING if verb == "claim" else Status.CANCELLED)
    assert store.client.hexists(store.keys.control(T), "cancel") == (verb == "claim")


def test_a_cancelled_task_whose_holder_died_is_cancelled_not_run_again(store: Store) -> None:
    at_a(store)
    store.cancel(T, by="ann")
    lapse(store)
    assert store.recover(T, proof="p") is Status.CANCELLED
    assert (jobs(store.client), field(store, "reason")) == ([], "ann")


def test_a_cancel_left_over_by_hand_on_a_queued_task_can_still_be_carried_out(store: Store) -> None:
    """No verb leaves one there; but if one is, "already asked" would make the task impossible to cancel."""
    queued(store)
    store.client.hset(store.keys.control(T), "cancel", "stray")
    store.cancel(T, by="ann")
    assert status(store) is Status.CANCELLED


# -- retry ---------------------------------------------------------------------------------------------------------


def test_a_retried_task_goes_on_from_its_checkpoint_with_fresh_counts(store: Store) -> None:
    dead(store)
    assert store.retry(T, by="ann", turns_max=99) == 4
    assert jobs(store.client) == [f"{T}-4"]
    values = ["crashes", "crashesInRow", "error", "result", "finishedAtMs", "maxTurns"]
    assert [field(store, name) for name in values] == ["0", "0", "", "", "", "99"]
    holder = claim(store)
    loaded = load(store.client, store.keys, store.probe, holder)
    assert loaded.checkpoint is not None
    assert (loaded.checkpoint.turns, loaded.checkpoint.messages) == (1, AT_A.messages)
    store.save_results(holder, AT_B.messages[-1], AT_B)


def test_a_retry_forgets_the_cancel_that_ended_the_task(store: Store) -> None:
    holder = at_a(store)
    store.cancel(T, by="ann")
    store.finish(holder, Status.CANCELLED, reason="ann")
    store.retry(T, by="bob")
    claim(store).watch()
    assert not store.client.hexists(store.keys.control(T), "cancel")


def test_a_task_that_has_just_expired_cannot_be_retried(store: Store) -> None:
    ended(store, Status.FAILED)
    store.client.delete(*store.keys.of_task(T))
    before = dump(store.client)
    with pytest.raises(TaskNotFound):
        store.retry(T, by="ann")
    assert dump(store.client) == before
    store.client.delete(store.keys.index("finished"))


def test_a_second_retry_finds_nothing_to_do(store: Store, another: Callable[..., Store]) -> None:
    """Two operators press at once: the second's look was before the first's write."""
    ended(store, Status.FAILED)
    after_own_look(store, "afresh", lambda: another().retry(T, by="bob"))
    with pytest.raises(Exception, match="it cannot be retried now"):
        store.retry(T, by="ann")
    assert jobs(store.client) == [f"{T}-2"]


def put_aside(store: Store, holder: Holder, verb: str) -> None:
    if verb == "park":
        store.park(holder, "waits", wait_ms=None)
    else:
        store.hand_over(holder, "drain")
