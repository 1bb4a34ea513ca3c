"""`--deadline`: a task that is not done in time fails, wherever it stands, and can be given more time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enqueue.request import new_task
from tests.support.agents import Bench, T, calls, say, use
from worker.errors import InvalidInput, ModelTransient, TaskConflict
from worker.settings import load_settings
from worker.state.codec import digest
from worker.state.task import NewTask, Status
from worker.tools import ToolContext, tool

LOOK = calls(use("look", 1, line="a"))
TIME_MS = 5_000


def with_deadline(*steps: Any, deadline_ms: int | None = TIME_MS, **options: Any) -> Bench:
    bench = Bench(*steps, **options)
    bench.enqueue(deadline_ms=deadline_ms)
    return bench


def test_it_is_looked_at_before_each_model_call_and_a_tool_is_not_interrupted() -> None:
    seen: list[float | None] = []

    @tool
    def slow(context: ToolContext) -> str:
        seen.append(context.deadline)
        bench.clock.advance(6)
        return "slow"

    bench = with_deadline(calls(use("slow", 1)), say(), tools=(slow,))
    ends_at = bench.clock.monotonic() + TIME_MS / 1000
    assert bench.run() is Status.FAILED
    assert bench.task().reason.startswith("limit: deadline ")
    assert bench.results()[0]["content"] == "slow", "what it did is in the conversation"
    assert len(bench.model.log) == 1
    assert seen == [pytest.approx(ends_at, abs=0.01)]


def test_control_without_a_deadline_the_same_task_is_done() -> None:
    @tool
    def slow(context: ToolContext) -> str:
        assert context.deadline is None
        bench.clock.advance(6)
        return "slow"

    bench = with_deadline(calls(use("slow", 1)), say(), tools=(slow,), deadline_ms=None)
    assert bench.run() is Status.SUCCEEDED


def test_a_model_call_that_runs_when_it_passes_is_abandoned() -> None:
    def long(body: Any, watch: Callable[[], None]) -> Any:
        bench.clock.advance(4)
        watch()
        bench.clock.advance(2)
        watch()
        raise AssertionError("not abandoned")

    bench = with_deadline(long)
    assert bench.run() is Status.FAILED
    assert bench.task().reason.startswith("limit: deadline ")
    assert bench.task().crashes == 0


def test_a_task_that_comes_too_late_ends_at_its_claim_and_a_person_can_give_it_time() -> None:
    bench = with_deadline(LOOK, say())
    bench.clock.advance(6)
    assert "limit: deadline" in bench.deliver(), "shown to RQ as a failed job"
    assert (bench.status(), bench.task().attempts, len(bench.model.log)) == (Status.FAILED, 0, 0)
    bench.store.retry(T, by="ann")
    bench.deliver()
    assert bench.status() is Status.FAILED, "the control: it has no more time than before"
    bench.store.retry(T, by="ann", deadline_ms=TIME_MS)
    assert bench.run() is Status.SUCCEEDED


def test_nobody_waits_for_longer_than_until_the_deadline() -> None:
    bench = with_deadline([ModelTransient("busy", retry_after_s=300)])
    bench.deliver()
    task = bench.task()
    assert task.status is Status.PARKED
    assert task.wake_at_ms == task.deadline_ms == task.created_at_ms + TIME_MS
    bench.clock.advance(6)
    assert bench.store.wake(T, due_only=True)
    bench.deliver()
    assert bench.status() is Status.FAILED


def test_it_is_a_part_of_the_request_and_requests_without_it_are_named_as_ever() -> None:
    bench = with_deadline(say())
    bench.enqueue(deadline_ms=TIME_MS)
    for other in ({}, {"deadline_ms": 1}, {"deadline_ms": TIME_MS, "concurrency_key": "k", "concurrency": 2}):
        with pytest.raises(TaskConflict):
            bench.enqueue(**other)
    before = ["x", "agents", "", "", 40, None, None, [], 0]
    assert NewTask(T, "x", "agents").digest() == digest(before), "as before there were deadlines"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"deadline_s": 0}, "the deadline must be more than 0"),
        ({"deadline_s": -1}, "the deadline must be 0 to"),
        ({"deadline_s": float("nan")}, "the deadline must be 0 to"),
        ({"deadline_s": 60, "delay_s": 60}, "later than the delay"),
        ({"concurrency_key": "k"}, "go together"),
        ({"concurrency": 2}, "go together"),
        ({"concurrency_key": "a\nb", "concurrency": 2}, "printable"),
        ({"concurrency_key": "k" * 101, "concurrency": 2}, "1 to 100"),
        ({"concurrency_key": "k", "concurrency": 0}, "from 1 to 10000"),
        ({"concurrency_key": "k", "concurrency": 10_001}, "from 1 to 10000"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(asked: dict[str, Any], says: str) -> None:
    settings = load_settings({})
    with pytest.raises(InvalidInput, match=says):
        new_task(settings, "x", **asked)
    good = new_task(settings, "x", deadline_s=61, delay_s=60, concurrency_key="team a", concurrency=10_000)
    assert (good.deadline_ms, good.concurrency_key, good.concurrency) == (61_000, "team a", 10_000)
