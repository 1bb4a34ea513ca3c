"""What the model may answer without breaking anything: stored as it came, made sendable, or refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.agents import Answer, Bench, calls, say, use
from worker.state.task import Status
from worker.tools import tool

SEND = use("send", line="a")


@tool
def count(n: int) -> str:
    return f"{type(n).__name__} {n}"


def ran(*steps: Any, echoes: bool = True) -> Bench:
    bench = Bench(*steps)
    bench.enqueue()
    bench.run()
    bench.check(echoes=echoes)
    return bench


def test_blocks_go_back_exactly_as_they_came() -> None:
    """G08: thinking with its signature, unknown types, odd fields, in their order."""
    content = [
        {"type": "thinking", "thinking": "", "signature": "EqQB/+=="},
        {"type": "redacted_thinking", "data": "x" * 30},
        {"type": "from_the_future", "b": 1, "a": [None, {"": 1.5}], "text": None},
        {"type": "text", "text": " as is \u2028 \U0001f389 ", "citations": [{"cited_text": "é"}]},
        SEND,
    ]
    bench = Bench(Answer(content, "tool_use"), say())
    bench.enqueue()
    assert bench.run(("after-save-a", 1)) is Status.SUCCEEDED
    assert repr(bench.model.bodies[1]["messages"][1]["content"]) == repr(content)
    bench.check()


def test_lone_surrogates_become_replacement_characters_everywhere() -> None:
    """M24: they could not even be sent. In a call's input, in text, and in what ends the task."""
    first = calls({"type": "text", "text": "hm \ud800"}, use("send", line="a\udfff"))
    bench = ran(first, say("bye \ud83d"), echoes=False)
    assert bench.status() is Status.SUCCEEDED
    assert bench.effects == ["send a\ufffd"]
    assert bench.task().result == "bye \ufffd"


@pytest.mark.parametrize("stop", ["end_turn", "max_tokens", "refusal", "odd \ud800 reason"])
def test_a_lone_surrogate_in_the_last_words_is_no_crash(stop: str) -> None:
    bench = ran(say("half \ud83d", stop))
    assert bench.task().result == "half \ufffd"
    assert bench.task().crashes == 0
    assert len(bench.model.log) == 1


def test_a_split_surrogate_pair_becomes_the_character_it_was() -> None:
    assert ran(say("\ud83c\udf89")).task().result == "\U0001f389"


def test_an_integer_of_77_bits_reaches_the_tool_as_it_is_over_a_death_too() -> None:
    """E04."""
    bench = Bench(calls(use("send", line="a", n=2**70), use("count", 2, n=2**70)), say(), tools=(count,))
    bench.enqueue()
    assert bench.run(("after-save-a", 1)) is Status.SUCCEEDED
    assert bench.results()[1]["content"] == f"int {2**70}"
    sent = bench.model.bodies[1]["messages"][1]["content"][1]["input"]["n"]
    assert (type(sent), sent) == (int, 2**70)


DEEP: Any = "bottom"
for _ in range(300):
    DEEP = [DEEP]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), DEEP], ids=["inf", "nan", "too deep"])
def test_an_answer_that_cannot_be_stored_fails_the_task_in_words_and_runs_nothing(value: Any) -> None:
    bench = ran(calls(use("send", line="a"), use("look", 2, n=value)))
    assert bench.status() is Status.FAILED
    assert bench.task().reason.startswith("the model's answer cannot be stored: ")
    assert "req_1" in bench.task().error
    assert bench.task().crashes == 0
    assert bench.effects == []
    assert len(bench.model.log) == 1


def test_a_blank_text_block_of_the_model_is_not_sent_back_where_it_would_be_refused_for_ever() -> None:
    """G12: the API answers with such blocks and refuses them."""
    blanks = [{"type": "text", "text": text} for text in ("\n", "")]
    bench = ran(calls(blanks[0], SEND, blanks[1]), say(), echoes=False)
    assert bench.status() is Status.SUCCEEDED
    assert bench.model.bodies[1]["messages"][1]["content"] == [SEND]
