"""BATON_TOOLS of the bench's workers: one tool whose result has 2 KiB; and, where BENCH_MODEL says so, a model inside
the process, so that no HTTP is part of what is measured."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from worker.model import Claude, Response
from worker.tools import Toolbox, tool

RESULT_BYTES = 2048
IN_PROCESS = {"BENCH_MODEL": "in-process"}
USAGE = {"input_tokens": 10, "output_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}

_TURNS = re.compile(r"turns=(\d+)")


@tool
def produce(turn: int) -> str:
    """2 KiB of text."""
    return f"{turn:08d}" + "x" * (RESULT_BYTES - 8)


def text_of_task(turns: int, more: object = "") -> str:
    """A task that ends in its `turns`-th turn."""
    return f"bench turns={turns} {more}"


def answer(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that continues a conversation of such a task: a call of `produce`, or the end."""
    turn = len(messages) // 2  # messages alternate, and the first is the user's
    found = _TURNS.search(str(messages[0]["content"]))
    call = {"type": "tool_use", "id": f"toolu_{turn:06d}", "name": "produce", "input": {"turn": turn}}
    over = found is None or turn + 1 >= int(found[1])
    return {
        "id": f"msg_{turn}",
        "type": "message",
        "role": "assistant",
        "model": "bench",
        "content": [{"type": "text", "text": "done"}] if over else [call],
        "stop_reason": "end_turn" if over else "tool_use",
        "stop_sequence": None,
        "usage": USAGE,
    }


def respond(
    self: object, request: dict[str, Any], messages: Sequence[dict[str, Any]], *, watch: Callable[[], None]
) -> Response:
    """In place of `Model.respond`."""
    said = answer(messages)
    return Response(said["content"], said["stop_reason"], dict(USAGE), None, 1)


def toolbox() -> Toolbox:
    return Toolbox([produce])


@contextmanager
def in_this_process() -> Iterator[None]:
    """While the block runs, tasks of this process are answered in it, too."""
    former, key = Claude.respond, os.environ.get("ANTHROPIC_API_KEY")
    Claude.respond = respond  # type: ignore[method-assign]
    os.environ["ANTHROPIC_API_KEY"] = "bench"
    try:
        yield
    finally:
        Claude.respond = former  # type: ignore[method-assign]
        os.environ.pop("ANTHROPIC_API_KEY")
        os.environ.update({} if key is None else {"ANTHROPIC_API_KEY": key})


if os.environ.items() >= IN_PROCESS.items():
    Claude.respond = respond  # type: ignore[method-assign]
