"""What the tests of the model need: settings, a conversation, a client over a made-up transport."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2

from worker.clock import Clock, ManualClock
from worker.model import Claude
from worker.request import build_request
from worker.settings import Settings, load_settings

HELLO = [{"role": "user", "content": "hello"}]
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 4},
}


class RecordingClock(ManualClock):
    """Time that passes at once; `slept` says in which portions."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        super().sleep(seconds)


def settings(**values: Any) -> Settings:
    return load_settings({}, **values)


def request(**values: Any) -> dict[str, Any]:
    return build_request(settings(**values), model="claude-test", system=None, tools=[])


def go_on() -> None:
    """A watch that never stops anything."""


def claude(url: str, clock: Clock | None = None, **values: Any) -> Claude:
    """The real client against a real server."""
    return Claude(settings(**values), clock or RecordingClock(), api_key="test-key", base_url=url)


def mocked(answers: Callable[[httpx2.Request], httpx2.Response], **values: Any) -> Claude:
    """The real client over a transport that is a function."""
    return Claude(
        settings(**values),
        RecordingClock(),
        api_key="test-key",
        base_url="http://mock.invalid",
        transport=httpx2.MockTransport(answers),
    )


def message(**fields: Any) -> dict[str, Any]:
    return {**MESSAGE, **fields}


def stream(*events: dict[str, Any], names: bool = True) -> httpx2.Response:
    lines = [(f"event: {event.get('type')}\n" if names else "") + f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx2.Response(
        200, headers={"content-type": "text/event-stream", "request-id": "req_s"}, text="".join(lines)
    )


def events_of(*blocks: dict[str, Any], deltas: dict[int, list[dict[str, Any]]], stop: str) -> Iterator[Any]:
    """The events of a message of `blocks`, each with its deltas."""
    yield {"type": "message_start", "message": message(content=[], stop_reason=None)}
    for index, block in enumerate(blocks):
        yield {"type": "content_block_start", "index": index, "content_block": block}
        for delta in deltas.get(index, []):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 9}}
    yield {"type": "message_stop"}
