"""Asking a tool whether a call that was cut off took effect."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.tools_kit import STOPS, context
from worker.tools import ToolContext, Verdict, tool

ran: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


VERDICTS = [
    (Verdict.happened("id 7"), Verdict.happened("id 7")),
    (Verdict.happened({"id": 7}), Verdict.happened('{"id":7}')),
    (Verdict.not_happened(), Verdict.not_happened()),
    (Verdict.unknown(), Verdict.unknown()),
    (False, Verdict.not_happened()),
    (None, Verdict.unknown()),
    ("yes", Verdict.unknown()),
    (1, Verdict.unknown()),
]


@pytest.mark.parametrize(("answered", "verdict"), VERDICTS)
def test_a_verify_answers_with_a_verdict(answered: Any, verdict: Verdict) -> None:
    def verify(context: ToolContext, to: str) -> Any:
        ran.append((context.idempotency_key, to))
        return answered

    @tool(verify=verify)
    def send(to: str, body: str) -> None:
        raise AssertionError("asking must not run the tool")

    assert send.ask({"to": "ada", "body": "hi"}, context()) == verdict
    assert ran == [("t1:1:toolu_1", "ada")]


def test_true_means_happened_and_says_who_confirmed_it() -> None:
    @tool(verify=lambda: True)
    def send(to: str) -> None: ...

    verdict = send.ask({"to": "a"}, context())
    assert verdict.outcome == "happened"
    assert "confirmed by verify" in verdict.result


def test_a_verify_with_keyword_arguments_gets_all_of_the_input() -> None:
    async def verify(**input: Any) -> bool:
        ran.append(input)
        return False

    @tool(verify=verify)
    def send(to: str, n: int = 1) -> None: ...

    assert send.ask({"to": "a"}, context()) == Verdict.not_happened()
    assert ran == [{"to": "a", "n": 1}]


def test_a_verify_that_fails_knows_nothing() -> None:
    def verify(to: str) -> bool:
        raise ConnectionError

    @tool(verify=verify)
    def send(to: str) -> None: ...

    assert send.ask({"to": "a"}, context()) == Verdict.unknown()


def test_a_tool_without_verify_knows_nothing() -> None:
    @tool
    def send(to: str) -> None: ...

    assert send.ask({"to": "a"}, context()) == Verdict.unknown()


@pytest.mark.parametrize("stop", STOPS)
def test_control_flow_passes_through_verify(stop: type[BaseException]) -> None:
    def verify(to: str) -> bool:
        raise stop

    @tool(verify=verify)
    def send(to: str) -> None: ...

    with pytest.raises(stop):
        send.ask({"to": "a"}, context())
