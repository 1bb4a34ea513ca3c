"""The body we make ourselves is the one that the SDK makes, byte for byte; and each message is encoded once."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx2
import pytest

from worker.model_body import Bodies

FIRST: dict[str, Any] = {"role": "user", "content": 'a "task" with ü, \U0001f600, \\ and\nlines'}
ANSWER: dict[str, Any] = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "", "signature": "s=="},
        {"type": "block_of_tomorrow", "n": 2**70, "x": 0.1, "y": 1e22, "none": None},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"z": {}, "a": [True, 1]}},
    ],
}
RESULT: dict[str, Any] = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "done", "is_error": True}],
}
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {"z": {}, "a": {}}}}
REQUESTS: list[dict[str, Any]] = [
    {"model": "m", "max_tokens": 10},
    {"model": "m", "max_tokens": 10, "cache_control": {"type": "ephemeral"}},
    {
        "model": "m", "max_tokens": 64_000, "system": "be brief", "tools": [TOOL], "thinking": {"type": "adaptive"},
        "cache_control": {"type": "ephemeral"},
    },
]  # fmt: skip


def body_of_sdk(request: dict[str, Any], messages: list[dict[str, Any]]) -> bytes:
    sent: list[bytes] = []

    def answer(asked: httpx2.Request) -> httpx2.Response:
        sent.append(asked.read())
        return httpx2.Response(400, json={"type": "error", "error": {"type": "invalid_request_error", "message": "no"}})

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http:
        client = anthropic.Anthropic(api_key="k", base_url="http://model.invalid", max_retries=0, http_client=http)
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(**request, messages=messages, stream=True)
    return sent[0]


@pytest.mark.parametrize("request_", REQUESTS, ids=["bare", "cached", "all"])
@pytest.mark.parametrize("length", [1, 3])
def test_the_body_is_the_one_that_the_sdk_makes(request_: dict[str, Any], length: int) -> None:
    messages = [FIRST, ANSWER, RESULT][:length]
    assert Bodies().make(request_, messages) == body_of_sdk(request_, messages)


def test_a_message_is_encoded_once_however_often_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []
    real = json.dumps

    def dumps(value: Any, **options: Any) -> str:
        encoded.append(value)
        return real(value, **options)

    bodies, request = Bodies(), REQUESTS[0]
    first = bodies.make(request, [FIRST])
    monkeypatch.setattr(json, "dumps", dumps)
    grown = bodies.make(request, [FIRST, ANSWER, RESULT])
    assert [value for value in encoded if isinstance(value, dict) and "role" in value] == [ANSWER, RESULT]
    encoded.clear()
    assert bodies.make(request, [FIRST, ANSWER, RESULT]) == grown
    assert [value for value in encoded if isinstance(value, dict) and "role" in value] == []
    assert bodies.make(request, [FIRST]) == first, "a shorter one, too"


def test_another_conversation_is_not_taken_for_the_last_one() -> None:
    bodies, request = Bodies(), REQUESTS[0]
    bodies.make(request, [FIRST, ANSWER, RESULT])
    other = [{"role": "user", "content": "another"}, ANSWER, RESULT]
    assert bodies.make(request, other) == Bodies().make(request, other)
    equal = [dict(FIRST), ANSWER]
    assert bodies.make(request, equal) == Bodies().make(request, equal)


@pytest.mark.parametrize("request_", [{**REQUESTS[0], "of_tomorrow": 1}, {**REQUESTS[0], "system": float("nan")}])
def test_what_the_sdk_would_refuse_is_refused(request_: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Bodies().make(request_, [FIRST])
