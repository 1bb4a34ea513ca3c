"""Somebody gave the RQ job a timeout (case H09): it ends the attempt, is no tool's error, and loses nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.agents import Bench, JobTimeout, calls, say, use
from worker.answers import STATE_UNKNOWN
from worker.dispatch import JOB_TIMEOUTS
from worker.state.task import Status
from worker.tools import tool

SEND = use("send", 1, line="a")


def started(*steps: Any, **options: Any) -> Bench:
    bench = Bench(*steps, **options)
    bench.enqueue()
    return bench


def test_rqs_timeout_is_what_we_take_it_for() -> None:
    from rq.timeouts import JobTimeoutException

    assert issubclass(JobTimeoutException, JOB_TIMEOUTS)


def test_a_timeout_after_some_progress_hands_the_task_over_and_is_no_crash() -> None:
    bench = started(calls(SEND), [JobTimeout("180 s"), say()])
    assert bench.deliver() == "handed over at RQ's job timeout"
    task = bench.task()
    assert (task.status, task.hand_overs, task.crashes) == (Status.QUEUED, 1, 0)
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send a"]


def test_a_timeout_without_any_progress_counts_as_a_crash() -> None:
    bench = started([JobTimeout("180 s")])
    assert [bench.deliver() for _ in range(3)] == ["given back: RQ's job timeout"] * 3
    assert bench.status() is Status.DEAD


@pytest.mark.parametrize("effect", ["read_only", "idempotent"])
def test_a_call_that_is_longer_than_the_timeout_is_not_begun_for_ever(effect: Any) -> None:
    """Each attempt gets to the same call, marks it, and is cut off: that is no progress."""

    @tool(effect=effect)
    def endless(line: str) -> str:
        bench.world.did("endless", line)
        raise JobTimeout("180 s")

    bench = started(calls(use("endless", line="a")), say(), tools=(endless,))
    assert bench.run() is Status.DEAD
    assert bench.effects == ["endless a"] * 4, "the first attempt got as far as point A"
    assert len(bench.model.log) == 1


def test_calls_recorded_before_a_timeout_are_progress() -> None:
    """The control: a response with many calls gets through, a few per attempt."""
    left = iter([False, True] * 20)

    @tool(effect="idempotent")
    def slow(line: str) -> str:
        if next(left):
            raise JobTimeout("180 s")
        return bench.world.did("slow", line)

    bench = started(calls(*(use("slow", n, line=str(n)) for n in range(8))), say(), tools=(slow,))
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == [f"slow {n}" for n in range(8)]
    assert bench.task().crashes == 0
    bench.check()


def test_a_timeout_while_the_tools_are_loaded_for_a_resume_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored by earlier attempts is not this attempt's doing."""

    def endless(*args: Any) -> Any:
        raise JobTimeout("180 s")

    bench = started(calls(SEND), [JobTimeout("180 s"), say()])
    bench.deliver()
    monkeypatch.setattr("tests.support.agents.Toolbox", endless)
    assert bench.deliver() == "given back: RQ's job timeout"
    assert bench.task().crashes == 1


def test_a_timeout_in_a_side_effect_leaves_it_unknown() -> None:
    @tool
    def endless(line: str) -> str:
        bench.world.did("endless", line)
        raise JobTimeout("180 s")

    bench = started(calls(use("endless", line="a")), say(), tools=(endless,))
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["endless a"]
    assert bench.results()[0]["content"] == STATE_UNKNOWN


def test_a_tool_that_swallows_the_timeout_has_made_it_its_own() -> None:
    @tool
    def broad(line: str) -> str:
        try:
            raise JobTimeout("180 s")
        except Exception:
            return bench.world.did("broad", line)

    bench = started(calls(use("broad", line="a")), say(), tools=(broad,))
    assert bench.deliver() == "succeeded"
    assert bench.results()[0]["content"] == "did broad a"


@pytest.mark.parametrize(
    "label", ["after-start-mark", "after-effect-write", "after-save-a", "after-save-b", "before-finish"]
)
def test_a_timeout_anywhere_in_our_own_code_loses_nothing_and_repeats_nothing(label: str) -> None:
    def strike() -> None:
        raise JobTimeout("180 s")

    bench = started(calls(use("post", 1, line="a")), say())
    with bench.hooked({(label, 1): strike}):
        try:
            bench.deliver()
        except JobTimeout:
            assert label == "before-finish", "on the way out it is like any other error of ours"
    assert bench.status() is Status.QUEUED
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["post a"]
    bench.check()


def test_a_timeout_in_calls_that_run_side_by_side_hands_over_with_what_they_recorded() -> None:
    @tool(effect="read_only")
    def peek(n: int) -> int:
        if n == 2 and bench.task().attempts == 1:
            raise JobTimeout("180 s")
        bench.world.did("peek", str(n))
        return n

    bench = started(calls(*(use("peek", n, n=n) for n in range(4))), say(), tools=(peek,))
    assert bench.deliver() == "handed over at RQ's job timeout"
    assert bench.run() is Status.SUCCEEDED
    assert [block["content"] for block in bench.results()] == ["0", "1", "2", "3"]
