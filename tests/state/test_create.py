"""Accepting a task: once per id, once per dedupe key, and with its RQ job or not at all."""

from __future__ import annotations

import pickle
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.state.kit import (
    QUEUE,
    STATES,
    T,
    claim,
    counters,
    ended,
    field,
    indexes_of,
    jobs,
    new_task,
    nothing_written,
    queued,
    status,
)
from worker.errors import TaskConflict
from worker.state.standing import Refused
from worker.state.store import Store
from worker.state.task import Created, Status
from worker.state.views import Views


def test_the_job_says_where_to_look_and_nothing_else(store: Store) -> None:
    """RQ prints descriptions into logs and its dashboard renders them raw, so no word of the task may be in it."""
    store.create(new_task(words="secret <script>"))
    assert jobs(store.client) == [f"{T}-1"]
    job = store.client.hgetall(f"rq:job:{T}-1")
    assert pickle.loads(zlib.decompress(job[b"data"])) == ("worker.jobs.run_task", None, (T, 1), {})
    assert job[b"description"].decode() == f"task {T}, delivery 1"
    assert (job[b"timeout"], job[b"result_ttl"], job[b"failure_ttl"]) == (b"-1", b"600", b"259200")
    assert store.client.ttl(f"rq:job:{T}-1") == -1, "a backlog may be longer than any ttl"
    assert not any(b"script" in value for value in job.values())
    assert store.client.smembers("rq:queues") == {QUEUE.encode()}, "rq-dashboard finds the queue"


def test_the_same_request_under_the_same_id_is_the_same_task(store: Store) -> None:
    """A client that never saw the answer asks again: nothing is enqueued a second time (F16)."""
    assert store.create(new_task()) == Created(T, existed=False)
    with nothing_written(store.client):
        assert store.create(new_task()) == Created(T, existed=True)


@pytest.mark.parametrize("other", [{"words": "say bye"}, {"model": "m2"}, {"turns_max": 1}, {"delay_ms": 5}])
def test_another_request_under_a_taken_id_is_a_conflict(store: Store, other: dict[str, Any]) -> None:
    store.create(new_task())
    with nothing_written(store.client), pytest.raises(TaskConflict, match=T):
        store.create(new_task(**other))


@pytest.mark.parametrize("state", [state for state in STATES if state != "absent"])
def test_a_dedupe_key_answers_for_tasks_that_are_alive_or_done_and_for_no_failed_one(store: Store, state: str) -> None:
    """C16: an identical submission was answered with the id of a job that had died."""
    create, plain = store.create, new_task
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "create", lambda new: create(plain(dedupe_key="daily")))
        STATES[state](store)
    again = store.create(new_task("t2", dedupe_key="daily"))
    if status(store) in (Status.FAILED, Status.CANCELLED, Status.DEAD):
        assert again == Created("t2", existed=False)
        assert store.client.get(store.keys.dedupe("daily")) == b"t2", "from now on the new one answers"
    else:
        assert again == Created(T, existed=True)
        assert not store.client.exists(store.keys.task("t2"))


def test_a_dedupe_key_that_names_an_expired_task_is_free(store: Store) -> None:
    store.create(new_task(dedupe_key="daily"))
    ended_keys = [*store.keys.of_task(T), f"rq:job:{T}-1"]
    store.client.delete(*ended_keys, QUEUE, *(store.keys.index(name) for name in ("queued",)))
    assert store.create(new_task("t2", dedupe_key="daily")) == Created("t2", existed=False)


def test_the_dedupe_key_ends_with_the_retention_time(store: Store) -> None:
    store.create(new_task(dedupe_key="daily"))
    assert 0 < store.client.pttl(store.keys.dedupe("daily")) <= store.policy.retention_s * 1000


def test_many_clients_with_one_dedupe_key_get_one_task(another: Callable[..., Store], store: Store) -> None:
    clients = [another() for _ in range(8)]
    answers = together([lambda s=s: s.create(new_task(f"c{id(s)}", dedupe_key="k")) for s in clients])
    assert len({answer.task_id for answer in answers}) == 1
    assert [answer.existed for answer in answers].count(False) == 1
    assert len(jobs(store.client)) == 1
    assert counters(store)["created"] == 1


def test_a_delayed_task_waits_without_a_job_until_it_is_due(store: Store) -> None:
    store.create(new_task(delay_ms=5_000))
    assert (status(store), jobs(store.client), indexes_of(store)) == (Status.PARKED, [], ["parked"])
    assert not store.wake(T, due_only=True)
    store.clock.advance(5)  # type: ignore[attr-defined]  # a ManualClock
    assert store.wake(T, due_only=True)
    assert (status(store), jobs(store.client)) == (Status.QUEUED, [f"{T}-1"])


def test_a_delayed_task_can_be_cancelled_before_it_was_ever_delivered(store: Store) -> None:
    store.create(new_task(delay_ms=5_000))
    store.cancel(T, by="ann")
    assert status(store) is Status.CANCELLED


def test_what_was_asked_comes_back_as_it_was_asked(store: Store) -> None:
    asked = {"model": "m", "system": "s", "turns_max": 3, "tokens_max": 7, "tools": ("a", "b"), "tags": ("x", "ü")}
    store.create(new_task(words="wörds\n\u2028 🙂", **asked))
    task = Views(store.client, store.keys).task(T)
    assert {name: getattr(task, name) for name in asked} == asked
    assert task.text == "wörds\n\u2028 🙂"
    assert (task.status, task.delivery, task.attempts) == (Status.QUEUED, 1, 0)


def test_twenty_workers_with_one_delivery_one_owner(another: Callable[..., Store], store: Store) -> None:
    """B10: two resumes at once both passed a check that was read before it was acted on."""
    queued(store)
    workers = [another() for _ in range(20)]
    answers = together([lambda s=s: s.claim(T, 1, {}) for s in workers])
    losers = [answer for answer in answers if isinstance(answer, Refused)]
    assert len(losers) == 19
    assert number_of_claims(store) == 1
    store.client.expire(f"rq:job:{T}-1", 600)


def test_a_stale_a_doubled_and_an_early_delivery_are_refused_without_a_trace(store: Store) -> None:
    queued(store)
    store.redeliver(T, 1)
    with nothing_written(store.client):
        for delivery, why in ((1, "stale delivery 1, the current one is 2"), (3, "stale delivery 3")):
            refused = store.claim(T, delivery, {})
            assert isinstance(refused, Refused)
            assert why in refused.why
    claim(store)
    with nothing_written(store.client):
        doubled = store.claim(T, 2, {})
        assert isinstance(doubled, Refused)
        assert doubled.current
        assert doubled.why == "the task is running"


def test_a_finished_task_whose_job_comes_back_stays_finished(store: Store) -> None:
    """B11: after a broker's restart finished work was delivered again."""
    ended(store, Status.SUCCEEDED)
    with nothing_written(store.client):
        assert isinstance(store.claim(T, 1, {}), Refused)


def test_a_lock_held_by_hand_keeps_everybody_out(store: Store) -> None:
    """D01: a run that could not get the lock must not look like a run."""
    queued(store)
    store.client.set(store.keys.lock(T), "somebody", px=60_000)
    with nothing_written(store.client):
        refused = store.claim(T, 1, {})
    assert isinstance(refused, Refused)
    assert "lock" in refused.why
    assert field(store, "attempts") == ""


def test_the_epoch_grows_with_every_change_of_hands(store: Store) -> None:
    """D05: generations strictly grow; taking away counts too, so a sleeper can never match by chance."""
    queued(store)
    epochs = []
    for _ in range(10):
        holder = claim(store)
        epochs.append(holder.epoch)
        store.hand_over(holder, "drain")
    assert epochs == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]


def number_of_claims(store: Store) -> int:
    return counters(store).get("claimed", 0)


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run all at once, each in its own thread; the answers in order."""
    start, answers = threading.Barrier(len(calls)), [None] * len(calls)

    def run(place: int) -> None:
        start.wait()
        answers[place] = calls[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers
