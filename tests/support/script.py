"""A model in this process: answers from a script and keeps what it was asked."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """What `worker.model.Response` is, without the second that importing anthropic costs."""

    content: list[dict[str, Any]]
    stop_reason: str = "end_turn"
    usage: dict[str, int] = field(default_factory=lambda: {"input_tokens": 10, "output_tokens": 5})
    request_id: str | None = "req_1"
    tries: int = 1
    stop_details: dict[str, Any] | None = None
    resume_after_s: float | None = None

    @property
    def total_tokens(self) -> int:
        return sum(self.usage.values())

    @property
    def text(self) -> str:
        return "".join(block.get("text") or "" for block in self.content if block.get("type") == "text")


def say(words: str = "done", stop: str = "end_turn") -> Answer:
    return Answer([{"type": "text", "text": words}], stop)


def use(name: str, number: int | str = 1, /, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": given}


def calls(*blocks: dict[str, Any], stop: str = "tool_use") -> Answer:
    return Answer(list(blocks), stop)


class Script:
    """Implements `worker.model.Model`: the n-th step answers a conversation with n assistant messages in it.

    A step is an Answer, an exception to raise, or a function of (request body, watch) that gives one of them; a list
    of them is gone through call by call, and its last one stays. Asking beyond the last step is an error. `log` keeps
    a deep copy of every request, as the scripted model's log does.
    """

    def __init__(self, *steps: Any) -> None:
        self.steps = [deque(step if isinstance(step, list) else [step]) for step in steps]
        self.log: list[dict[str, Any]] = []

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [line["body"] for line in self.log]

    def respond(self, request: dict[str, Any], messages: Any, *, watch: Callable[[], None]) -> Answer:
        watch()
        body = copy.deepcopy({**request, "messages": list(messages)})
        self.log.append({"body": body})
        number = sum(message["role"] == "assistant" for message in messages)
        assert number < len(self.steps), f"asked once more after the end of the script: {messages[-1]}"
        left = self.steps[number]
        step = left.popleft() if len(left) > 1 else left[0]
        if callable(step) and not isinstance(step, type):
            step = step(body, watch)
        if isinstance(step, BaseException):
            raise step
        self.log[-1]["response"] = {"content": copy.deepcopy(step.content)}
        return copy.deepcopy(step)
