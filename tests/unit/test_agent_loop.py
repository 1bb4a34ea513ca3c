"""What ends a task, what only ends a turn, and what the model may answer without breaking anything."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.support.agents import Answer, Bench, Died, calls, say, use
from worker.errors import ModelPermanent
from worker.state.task import Status

SEND = use("send", line="a")


def ran(*steps: Any, words: str = "do it", **fields: Any) -> Bench:
    """A task run to its end, or to where it is parked."""
    bench = Bench(*steps)
    bench.enqueue(words, **fields)
    bench.run()
    bench.check()
    return bench


def test_the_double_answers_with_all_that_the_real_model_does() -> None:
    from worker.model import Response

    assert {f.name for f in dataclasses.fields(Answer)} == {f.name for f in dataclasses.fields(Response)}
    real = Response(**dataclasses.asdict(say("hi")))
    assert (real.text, real.total_tokens) == (say("hi").text, say("hi").total_tokens)


# -- the plain course ----------------------------------------------------------------------------------------------


def test_the_text_is_asked_and_the_last_answer_is_the_result() -> None:
    bench = ran(say("42"), words="how much?")
    assert bench.status() is Status.SUCCEEDED
    assert bench.task().result == "42"
    assert bench.model.bodies[0]["messages"] == [{"role": "user", "content": "how much?"}]


def test_the_task_offers_the_tools_it_was_given_and_no_others() -> None:
    bench = ran(calls(SEND), say(), tools=("look",))
    assert [tool["name"] for tool in bench.model.bodies[0]["tools"]] == ["look"]
    assert bench.effects == []
    assert bench.results()[0]["content"] == "There is no tool called 'send'. The tools are: look."


def test_a_task_that_names_an_unknown_tool_fails_before_the_model_is_asked() -> None:
    bench = ran(tools=("teleport",))
    assert bench.status() is Status.FAILED
    assert "there is no tool called teleport; there are: look, post" in bench.task().reason
    assert bench.model.log == []


def test_a_task_without_tools_says_so_to_a_model_that_calls_one() -> None:
    bench = ran(calls(SEND), say(), tools=())
    assert bench.results()[0]["content"] == "There is no tool called 'send'. This task has no tools."


def test_a_long_conversation_is_sent_whole_in_every_request() -> None:
    """A08: whatever is cut out of a history leaves calls without results. Nothing ever is."""
    rounds = 100
    bench = ran(*(calls(use("look", line=str(n))) for n in range(rounds)), say("done"), turns_max=rounds + 1)
    assert bench.status() is Status.SUCCEEDED
    assert [len(body["messages"]) for body in bench.model.bodies] == [2 * n + 1 for n in range(rounds + 1)]


def test_only_the_last_message_is_the_result() -> None:
    bench = ran(Answer([{"type": "text", "text": "first I send"}, SEND], "tool_use"), say("sent"))
    assert bench.task().result == "sent"


# -- stop reasons --------------------------------------------------------------------------------------------------


def test_a_stop_sequence_is_an_end_like_any_other() -> None:
    assert ran(say("so far", "stop_sequence")).task().result == "so far"


def test_a_pause_goes_on_with_the_paused_message_as_it_was() -> None:
    """G05."""
    bench = ran(say("let me think", "pause_turn"), say())
    assert bench.status() is Status.SUCCEEDED
    assert len(bench.model.log) == 2
    assert bench.model.bodies[1]["messages"][-1] == {"role": "assistant", "content": say("let me think").content}


def test_a_pause_that_holds_our_calls_answers_them_first() -> None:
    """G05: they were made, so the history needs their results."""
    bench = ran(calls(SEND, stop="pause_turn"), say())
    assert bench.effects == ["send a"]
    assert bench.status() is Status.SUCCEEDED


def test_pauses_without_end_are_bounded_by_the_turns() -> None:
    bench = ran(*[say("hm", "pause_turn")] * 4, turns_max=3)
    assert bench.status() is Status.FAILED
    assert len(bench.model.log) == 3


@pytest.mark.parametrize("stop", ["max_tokens", "model_context_window_exceeded"])
def test_a_call_that_was_cut_off_by_a_limit_is_not_run_and_not_kept(stop: str) -> None:
    """G04, G09: terminal after one request, and the history stays as it was."""
    bench = ran(calls(SEND, use("send", 2), stop=stop))
    assert bench.status() is Status.FAILED
    assert bench.task().reason.startswith("truncated: ")
    assert bench.effects == []
    assert len(bench.model.log) == 1
    assert [message["role"] for message in bench.messages()] == ["user"]
    assert bench.checkpoint().total_tokens == 15, "it was paid for all the same"


def test_a_refusal_ends_the_task_at_once() -> None:
    """G06."""
    bench = ran(Answer([], "refusal"))
    assert bench.status() is Status.FAILED
    assert bench.task().reason == "refused: the model declined to answer"
    assert len(bench.model.log) == 1
    assert bench.take_over() is None


def test_what_the_model_said_before_it_was_cut_off_is_the_tasks_result() -> None:
    assert ran(say("half an ans", "max_tokens")).task().result == "half an ans"


def test_an_unknown_stop_reason_ends_the_task_and_names_itself() -> None:
    bench = ran(calls(SEND, stop="meditating"))
    assert bench.status() is Status.FAILED
    assert bench.task().reason == "stopped: unknown stop_reason 'meditating'"
    assert bench.task().error.endswith("(request req_1)")
    assert bench.effects == []


def test_an_end_without_content_is_an_end_with_an_empty_result() -> None:
    """The API does so after tool results; an empty message must not get into the history."""
    bench = ran(calls(SEND), Answer([]))
    assert bench.status() is Status.SUCCEEDED
    assert bench.task().result == ""
    assert [message["role"] for message in bench.messages()] == ["user", "assistant", "user"]


def test_an_end_without_content_is_remembered_over_a_death() -> None:
    bench = Bench(calls(SEND), Answer([]))
    bench.enqueue()
    assert bench.run(("before-finish", 1)) is Status.SUCCEEDED
    assert len(bench.model.log) == 2


@pytest.mark.parametrize("crash", [(), (("after-save-a", 1),)], ids=["live", "resumed"])
def test_calls_in_an_answer_that_ended_are_not_run_and_their_loss_is_no_success(crash: Any) -> None:
    """Some gateways answer so. Whoever dropped the call in silence would call a half-done task done."""
    odd = Answer([{"type": "text", "text": "bye"}, SEND], "end_turn")
    bench = Bench([odd, odd])
    bench.enqueue()
    assert bench.run(*crash) is Status.FAILED
    assert bench.task().reason == "stopped: the model called a tool and ended all the same (end_turn)"
    assert bench.task().result == "bye"
    assert bench.effects == []
    assert len(bench.messages()) == 1


def test_a_failed_task_that_is_retried_goes_on_from_its_last_good_message() -> None:
    bench = ran(calls(SEND), [say("half", "max_tokens"), say("whole")])
    assert bench.status() is Status.FAILED
    bench.store.retry("t1", by="ann")
    assert bench.run() is Status.SUCCEEDED
    assert bench.task().result == "whole"
    assert bench.effects == ["send a"]
    bench.check()


# -- limits --------------------------------------------------------------------------------------------------------


def test_a_loop_of_calls_ends_at_the_turns_the_task_allows_with_its_history_whole() -> None:
    """H13."""
    bench = ran(*(calls(use("look", n, line="a")) for n in range(9)), turns_max=5)
    assert bench.status() is Status.FAILED
    assert bench.task().reason == "limit: 5 turns used, the task allows 5 (--max-turns)"
    assert len(bench.model.log) == 5
    assert bench.checkpoint().pending == ()


def test_the_last_turn_allowed_may_be_the_answer() -> None:
    """The control."""
    assert ran(calls(SEND), say(), turns_max=2).status() is Status.SUCCEEDED


def test_the_turns_of_dead_holders_count() -> None:
    """H14."""
    bench = Bench(*(calls(use("look", n, line="a")) for n in range(9)))
    bench.enqueue(turns_max=4)
    assert bench.run(*(("after-save-b", n) for n in range(1, 5))) is Status.FAILED
    assert bench.task().crashes == 4
    assert len(bench.model.log) == 4
    assert bench.checkpoint().total_tokens == 4 * 15


def test_more_turns_given_with_a_retry_are_used() -> None:
    bench = ran(calls(SEND), say(), turns_max=1)
    assert bench.status() is Status.FAILED
    bench.store.retry("t1", by="ann", turns_max=2)
    assert bench.run() is Status.SUCCEEDED


def test_the_token_limit_ends_the_task_after_the_response_that_reached_it() -> None:
    bench = ran(*(calls(use("look", n, line="a")) for n in range(9)), tokens_max=31)
    assert bench.status() is Status.FAILED
    assert bench.task().reason == "limit: 45 tokens used, the task allows 31 (--max-tokens-total)"
    assert len(bench.model.log) == 3


def test_the_token_limit_does_not_take_away_an_answer_that_is_there() -> None:
    assert ran(say("dear"), tokens_max=1).task().result == "dear"


# -- faults of the task, and none of it -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ModelPermanent("no", request_id="req_9"), ModelPermanent("no (request req_9)")])
def test_a_request_that_will_never_be_accepted_fails_the_task_after_one_try(error: ModelPermanent) -> None:
    """G09, G12: with the request id, once; the checkpoint stays as it was."""
    bench = ran(calls(SEND), error)
    assert bench.status() is Status.FAILED
    assert bench.task().error == "no (request req_9)"
    assert len(bench.model.log) == 2
    assert len(bench.messages()) == 3


def test_dying_at_the_model_is_no_failure_of_the_task() -> None:
    bench = Bench([Died("at the model"), say()])
    bench.enqueue()
    assert bench.run() is Status.SUCCEEDED
    assert bench.task().crashes == 1
