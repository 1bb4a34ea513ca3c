"""Running a call: bad input, failures, and what is neither."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tools_kit import STOPS, JobTimeout, answer, context, refusal
from worker.tools import ToolContext, ToolFailure, ToolResult, tool

ran: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


@tool
def append(text: str, times: int = 1) -> str:
    """Append text."""
    ran.append((text, times))
    return text * times


def test_a_good_call_runs_and_answers() -> None:
    assert append.check({"text": "a"}) is None
    assert answer(append, context(), text="a", times=2) == "aa"
    assert ran == [("a", 2)]


BAD = [
    ({}, "text: missing"),
    ({"text": 1}, "text: Input should be a valid string; got 1"),
    ({"text": "a", "times": "many"}, "times: Input should be a valid integer"),
    ({"text": "a", "tmies": 2}, "tmies: no such parameter; this tool takes: text, times"),
    ("text", "must be a JSON object"),
    (["a"], "must be a JSON object"),
    (None, "must be a JSON object"),
]


@pytest.mark.parametrize(("input", "words"), BAD)
def test_bad_input_is_answered_in_words_and_runs_nothing(input: Any, words: str) -> None:
    """Cases A05 and A15: the model must be able to mend its call, and no attempt is burnt."""
    checked = append.check(input)
    assert checked is not None
    assert checked == append.run(input, context())
    assert checked.is_error
    assert "append" in checked.content
    assert words in checked.content
    assert ran == []


def test_the_refusal_of_a_flood_of_mistakes_is_short() -> None:
    checked = append.check({f"p{n}" * 50: n for n in range(5_000)})
    assert checked is not None
    assert len(checked.content) < 10_001
    assert "more" in checked.content


def test_input_that_is_nested_without_end_is_refused() -> None:
    @tool
    def take(data: Any) -> None:
        ran.append(data)

    deep: Any = "x"
    for _ in range(50_000):
        deep = [deep]
    assert "nested" in refusal(take, context(), data=deep)
    assert ran == []


def test_an_integer_of_any_size_stays_an_integer() -> None:
    """Case E04."""

    @tool
    def echo(n: int, data: Any = None) -> str:
        return f"{type(n).__name__} {n} {data}"

    assert answer(echo, context(), n=2**70, data={"m": 2**70}) == f"int {2**70} {{'m': {2**70}}}"


def test_a_tool_that_changes_its_arguments_does_not_change_the_conversation() -> None:
    @tool
    def pop(data: dict[str, Any]) -> str:
        data["inner"].clear()
        return "ok"

    said = {"data": {"inner": [1]}}
    pop.run(said, context())
    assert said == {"data": {"inner": [1]}}


def test_a_raising_tool_answers_with_its_error_and_not_with_a_traceback() -> None:
    """Cases A04 and A16."""

    @tool(effect="read_only")
    def divide(n: int) -> float:
        return 1 / n

    assert refusal(divide, context(), n=0) == "ZeroDivisionError: division by zero"
    assert answer(divide, context(), n=1) == "1.0"


def test_a_tool_failure_speaks_in_its_own_words() -> None:
    @tool
    def no() -> None:
        raise ToolFailure("The shop is closed.")

    assert refusal(no, context()) == "The shop is closed."


def test_an_error_text_is_clean_and_bounded() -> None:
    @tool
    def noisy() -> None:
        raise ValueError("\ud800" + "x" * 1_000_000)

    text = refusal(noisy, context())
    assert text.startswith("ValueError: \ufffdxxx")
    assert len(text.encode()) <= 10_000
    assert "cut" in text


def test_an_error_that_cannot_even_be_read_is_still_an_answer() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    @tool
    def odd() -> None:
        raise Odd

    assert refusal(odd, context()).startswith("Odd: ")


@pytest.mark.parametrize("stop", STOPS)
def test_control_flow_is_never_a_tool_error(stop: type[BaseException]) -> None:
    """Case H09."""

    @tool
    def interrupted() -> None:
        raise stop

    @tool
    async def interrupted_async() -> None:
        await asyncio.sleep(0)
        raise stop

    for one in (interrupted, interrupted_async):
        with pytest.raises(stop):
            one.run({}, context())


def test_an_exception_is_control_flow_only_where_the_context_says_so() -> None:
    @tool(effect="read_only")
    def late() -> None:
        raise JobTimeout("late")

    assert late.run({}, context(control_flow=())) == ToolResult("JobTimeout: late", is_error=True)


def test_a_timeout_that_a_library_wrapped_is_still_control_flow() -> None:
    """anthropic's client raises its own connection error from whatever interrupts its socket call."""

    @tool
    def wrapped() -> None:
        try:
            raise JobTimeout
        except JobTimeout as error:
            raise ConnectionError("lost") from error

    @tool
    def hidden() -> None:
        try:
            raise JobTimeout
        except JobTimeout:
            raise ConnectionError("lost") from None

    for one in (wrapped, hidden):
        with pytest.raises(JobTimeout):
            one.run({}, context())


@pytest.mark.parametrize("stop", STOPS)
def test_control_flow_in_a_task_group_comes_out_as_itself(stop: type[BaseException]) -> None:
    @tool
    async def group() -> None:
        raise BaseExceptionGroup("both", [ValueError(), stop()])

    with pytest.raises(stop):
        group.run({}, context())


def test_a_group_of_plain_errors_is_a_tool_error() -> None:
    @tool
    async def group() -> None:
        raise ExceptionGroup("both", [ValueError("a")])

    assert refusal(group, context()).startswith("ExceptionGroup: both")


def test_a_tool_may_turn_the_exit_of_a_parser_into_a_failure() -> None:
    @tool
    def parse() -> None:
        try:
            raise SystemExit(2)
        except SystemExit as error:
            raise ToolFailure("usage: parse FILE") from error

    assert refusal(parse, context()) == "usage: parse FILE"


def test_an_async_tool_is_run_and_its_own_cancellation_is_its_failure() -> None:
    @tool
    async def twice(n: int, ctx: ToolContext) -> int:
        await asyncio.sleep(0)
        return 2 * n + ctx.turn

    @tool(effect="read_only")
    async def gives_up() -> None:
        raise asyncio.CancelledError

    assert answer(twice, context(turn=1), n=3) == "7"
    assert refusal(gives_up, context()) == "CancelledError"


def test_the_context_tells_whether_to_stop() -> None:
    @tool
    def patient(ctx: ToolContext) -> str:
        return str(ctx.cancelled)

    assert answer(patient, context()) == "False"
    assert answer(patient, context(should_stop=lambda: True)) == "True"


def test_a_tools_own_cap_wins_over_the_contexts() -> None:
    @tool(result_max_bytes=80)
    def long() -> str:
        return "x" * 1_000

    @tool
    def long_too() -> str:
        return "x" * 1_000

    assert len(answer(long, context()).encode()) <= 80
    assert len(answer(long_too, context())) == 1_000


def test_an_output_that_cannot_be_shown_is_an_error_that_says_that_the_tool_ran() -> None:
    @tool
    def circle() -> Any:
        ran.append(1)
        loop: list[Any] = []
        loop.append(loop)
        return loop

    assert refusal(circle, context()).startswith("The tool ran, but")
    assert ran == [1]


def test_a_tool_may_answer_with_a_result_of_its_own() -> None:
    @tool
    def known(ok: bool) -> ToolResult:
        return ToolResult("" if ok else "no", is_error=not ok)

    assert answer(known, context(), ok=True) == "(empty output)"
    assert refusal(known, context(), ok=False) == "no"


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.floats() | st.text(), st.lists)))
def test_check_and_run_agree_on_every_input(input: dict[str, Any]) -> None:
    checked = append.check(input)
    result = append.run(input, context())
    assert result.is_error == (checked is not None)
