"""A cancel asked for at any moment: the history it leaves is valid, and says what was run and what was not."""

from __future__ import annotations

from typing import Any

import pytest

from ops.transcript import check_request
from tests.support.agents import Bench, Died, T, calls, say, use
from worker.answers import NOT_EXECUTED, STATE_UNKNOWN
from worker.errors import CancelRequested, ModelTransient
from worker.state.task import Status
from worker.tools import ToolContext, tool


def bench_with_stop(*steps: Any, **options: Any) -> Bench:
    """`stop` cancels the task it runs in, as a person would from outside; as read-only `glance` does."""

    @tool
    def stop(line: str) -> str:
        bench.store.cancel(T, by="ann")
        return bench.world.did("stop", line)

    @tool(effect="read_only")
    def glance(line: str) -> str:
        bench.store.cancel(T, by="ann")
        return bench.world.did("glance", line)

    bench = Bench(*steps, tools=(stop, glance), **options)
    bench.enqueue()
    return bench


def check_saved(bench: Bench) -> None:
    """What is stored could be sent as it is, and nothing is pending."""
    assert check_request({"model": "m", "max_tokens": 1, "messages": bench.messages()}) == []
    assert bench.checkpoint().pending == ()


def test_a_cancel_between_two_calls_leaves_the_rest_not_executed_and_the_history_valid() -> None:
    """A11, H05."""
    bench = bench_with_stop(calls(use("stop", 1, line="a"), use("send", 2, line="b"), use("look", 3, line="c")), say())
    assert bench.deliver() == "cancelled"
    assert bench.effects == ["stop a"]
    assert [block["content"] for block in bench.results()] == ["did stop a", NOT_EXECUTED, NOT_EXECUTED]
    assert [block.get("is_error", False) for block in bench.results()] == [False, True, True]
    check_saved(bench)
    assert bench.status() is Status.CANCELLED
    assert bench.task().reason == "ann"
    assert len(bench.model.log) == 1


def test_without_a_cancel_all_three_run() -> None:
    """The control."""
    bench = bench_with_stop(calls(*(use("send", n, line=str(n)) for n in (1, 2, 3))), say())
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send 1", "send 2", "send 3"]


def test_a_cancel_during_the_last_call_keeps_all_results_and_asks_the_model_no_more() -> None:
    bench = bench_with_stop(calls(use("send", 1, line="a"), use("stop", 2, line="b")), say())
    assert bench.deliver() == "cancelled"
    assert [block["content"] for block in bench.results()] == ["did send a", "did stop b"]
    assert len(bench.model.log) == 1
    check_saved(bench)


def test_a_cancel_during_calls_that_run_side_by_side_keeps_what_they_returned() -> None:
    bench = bench_with_stop(
        calls(*(use("glance", n, line=str(n)) for n in range(12)), use("send", 99, line="z")), say()
    )
    assert bench.deliver() == "cancelled"
    said = [block["content"] for block in bench.results()]
    assert said[-1] == NOT_EXECUTED
    for n, words in enumerate(said[:-1]):
        ran = f"glance {n}" in bench.effects
        assert words == (f"did glance {n}" if ran else NOT_EXECUTED)
    check_saved(bench)


def test_a_cancel_during_the_model_call_abandons_it() -> None:
    def ask(body: Any, watch: Any) -> Any:
        bench.store.cancel(T, by="ann")
        bench.renew()
        watch()
        raise AssertionError("went on after the cancel")

    bench = bench_with_stop(ask)
    assert bench.deliver() == "cancelled"
    assert bench.messages() == [{"role": "user", "content": "do it"}]


def test_a_cancel_that_came_with_the_last_answer_does_not_take_the_answer_away() -> None:
    def ask(body: Any, watch: Any) -> Any:
        bench.store.cancel(T, by="ann")
        return say("here")

    bench = bench_with_stop(ask)
    assert bench.deliver() == "succeeded"
    assert bench.task().result == "here"


def test_a_cancel_that_came_before_a_park_cancels_instead() -> None:
    def ask(body: Any, watch: Any) -> Any:
        bench.store.cancel(T, by="ann")
        return ModelTransient("overloaded")

    bench = bench_with_stop(ask)
    assert bench.deliver() == "cancelled"
    assert bench.task().parks == 0


def test_a_holder_that_dies_after_a_cancel_was_asked_leaves_a_cancelled_task() -> None:
    """H02: and it can be taken up again by a person, who gets the usual reconcile."""
    bench = bench_with_stop(calls(use("stop", 1, line="a"), use("send", 2, line="b")), say())
    with bench.dying(("after-effect", 1)), pytest.raises(Died):
        bench.deliver()
    assert bench.take_over() is Status.CANCELLED
    assert len(bench.model.log) == 1
    bench.store.retry(T, by="ann")
    assert bench.run() is Status.SUCCEEDED
    assert [block["content"] for block in bench.results()] == [STATE_UNKNOWN, "did send b"]
    assert bench.effects == ["stop a", "send b"]


def test_a_cancelled_task_that_is_retried_goes_on_from_a_valid_history() -> None:
    bench = bench_with_stop(calls(use("stop", 1, line="a"), use("send", 2, line="b")), say())
    bench.deliver()
    bench.store.retry(T, by="ann")
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["stop a"], "the model was told that the second call was not executed"
    bench.check()


def test_a_call_that_a_cancel_ended_in_the_middle_is_unknown_and_not_unexecuted() -> None:
    @tool
    def obedient(line: str) -> str:
        bench.world.did("half of", line)
        raise CancelRequested("ann")

    bench = Bench(calls(use("obedient", line="a")), say(), tools=(obedient,))
    bench.enqueue()
    assert bench.deliver() == "cancelled"
    assert bench.results()[0]["content"] == STATE_UNKNOWN
    check_saved(bench)


def test_a_running_tool_can_see_that_it_should_stop() -> None:
    seen: list[bool] = []

    @tool
    def patient(context: ToolContext) -> str:
        seen.append(context.cancelled)
        bench.store.cancel(T, by="ann")
        bench.renew()
        seen.append(context.cancelled)
        return "stopped early"

    bench = Bench(calls(use("patient")), say(), tools=(patient,))
    bench.enqueue()
    assert bench.deliver() == "cancelled"
    assert seen == [False, True]
    assert bench.results()[0]["content"] == "stopped early"


def test_a_cancelled_task_takes_no_further_delivery() -> None:
    bench = bench_with_stop(calls(use("stop", 1, line="a")), say())
    bench.deliver()
    assert bench.deliver() == "nothing to do: the task is cancelled"
    assert len(bench.model.log) == 1
