"""Accepting many tasks at once: each keeps every promise that `create` makes for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enqueue import enqueue_many, enqueue_task
from tests.state.kit import counters, jobs, new_task, nothing_written, settings
from worker.errors import InvalidInput, TaskConflict
from worker.state import asked
from worker.state.store import Store
from worker.state.task import Created


def stored(store: Store, task_id: str) -> dict[bytes, bytes]:
    """The task's record without what differs from one create to the next."""
    found: Any = store.client.hgetall(store.keys.task(task_id))
    return {name: value for name, value in found.items() if name not in (b"nonce", b"change")}


def many(store: Store, requests: Any, **options: Any) -> list[Any]:
    return enqueue_many(requests, settings=settings(), client=store.client, **options)


def test_a_task_of_a_batch_is_stored_as_one_that_came_alone(store: Store) -> None:
    store.create(new_task("alone"))
    assert store.create_many([new_task("t1"), new_task("t2")]) == [Created("t1", False), Created("t2", False)]
    assert stored(store, "t1") == stored(store, "t2") == stored(store, "alone")
    assert jobs(store.client) == ["alone-1", "t1-1", "t2-1"], "in order"
    assert counters(store)["created"] == 3


def test_a_batch_is_as_few_transactions_as_its_size_allows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "CREATE_BATCH", 3)
    made = store.create_many([new_task(f"t{number}") for number in range(7)])
    assert [one.task_id for one in made] == [f"t{number}" for number in range(7)]
    assert len(jobs(store.client)) == 7


def test_repeating_a_batch_enqueues_only_what_was_not_accepted_before(store: Store) -> None:
    """A client that never saw the answer asks again."""
    store.create_many([new_task("t1"), new_task("t2")])
    again = store.create_many([new_task("t1"), new_task("t3"), new_task("t2")])
    assert again == [Created("t1", True), Created("t3", False), Created("t2", True)]
    assert jobs(store.client) == ["t1-1", "t2-1", "t3-1"]


def test_a_taken_id_is_never_overwritten_and_its_batch_not_begun(store: Store) -> None:
    store.create(new_task("t2", "another request"))
    with nothing_written(store.client), pytest.raises(TaskConflict, match="t2"):
        store.create_many([new_task("t1"), new_task("t2")])


def test_an_id_that_somebody_takes_meanwhile_is_seen(store: Store, another: Callable[..., Store]) -> None:
    """Between the look and the EXEC; the WATCH tells."""
    first, rival = another(), another()
    queue = first.writes.dispatcher.push

    def push(pipe: Any, task_id: str, *args: Any, **options: Any) -> None:
        if task_id == "t2":
            rival.create(new_task("t2"))
        queue(pipe, task_id, *args, **options)

    first.writes.dispatcher.push = push  # type: ignore[method-assign]
    assert first.create_many([new_task("t1"), new_task("t2")]) == [Created("t1", False), Created("t2", True)]
    assert sorted(jobs(store.client)) == ["t1-1", "t2-1"]


def test_one_id_or_one_dedupe_key_twice_in_a_batch_is_one_task(store: Store) -> None:
    news = [new_task("t1", dedupe_key="k"), new_task("t2", dedupe_key="k"), new_task("t3"), new_task("t3")]
    assert [(one.task_id, one.existed) for one in store.create_many(news)] == [
        ("t1", False), ("t1", True), ("t3", False), ("t3", True),
    ]  # fmt: skip
    assert jobs(store.client) == ["t1-1", "t3-1"]


def test_texts_and_requests_become_tasks_with_what_they_say_before_what_all_say(store: Store) -> None:
    one, other = many(store, ["first", {"text": "second", "tags": ["b"], "queue": "night"}], tags=["a"], turns_max=3)
    assert (one.task().text, one.task().tags, one.task().turns_max) == ("first", ("a",), 3)
    assert (other.task().text, other.task().tags, other.task().queue) == ("second", ("b",), "night")


@pytest.mark.parametrize(
    ("wrong", "why"), [("", "text is empty"), ({"text": "x", "colour": 1}, "unknown colour"), ({"tags": []}, "neither")]
)
def test_one_wrong_request_and_nothing_is_enqueued(store: Store, wrong: Any, why: str) -> None:
    with nothing_written(store.client), pytest.raises(InvalidInput, match=f"request 1.*{why}"):
        many(store, ["fine", wrong])


@pytest.mark.parametrize("single", ["sum it up", b"sum it up", {"text": "sum it up"}])
def test_a_single_request_is_not_taken_for_a_list_of_letters(store: Store, single: Any) -> None:
    with nothing_written(store.client), pytest.raises(InvalidInput, match="must be a list"):
        many(store, single)


def test_one_id_for_two_requests_of_a_batch_is_refused_before_it_is_begun(store: Store) -> None:
    with nothing_written(store.client), pytest.raises(TaskConflict, match="t2"):
        store.create_many([new_task("t1"), new_task("t2"), new_task("t2", "another request")])


def test_a_long_system_prompt_for_all_counts_in_the_size_of_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "CREATE_BATCH_BYTES", 1_000)
    news = [new_task(f"t{number}", system="s" * 400) for number in range(5)]
    assert [len(batch) for batch in asked._batches(news)] == [2, 2, 1]


def test_a_request_that_was_enqueued_alone_is_known_among_many(store: Store) -> None:
    enqueue_task("hello", task_id="t1", settings=settings(), client=store.client)
    assert [one.existed for one in many(store, [{"text": "hello", "task_id": "t1"}, "hello"])] == [True, False]
