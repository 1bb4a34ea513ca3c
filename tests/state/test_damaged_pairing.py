"""Conversations the API would refuse, refused at the door: calls without results, results without calls (A09)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.state.kit import (
    T,
    answered,
    begun,
    said,
    use,
)
from tests.state.test_damage import refused
from worker.state.store import Store

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "a result before any call": ([answered("toolu_1")], False),
    "begins with the assistant": ([said({"type": "text", "text": "x"})], False),
    "a call without its result in the middle": (
        [{"role": "user", "content": "x"}, said(use()), {"role": "user", "content": "y"}],
        False,
    ),
    "a result of another call": ([{"role": "user", "content": "x"}, said(use("a")), answered("b")], False),
    "a result twice": ([{"role": "user", "content": "x"}, said(use("a")), answered("a", "a")], False),
    "one of two results": ([{"role": "user", "content": "x"}, said(use("a"), use("b")), answered("a")], False),
    "results in another order": (
        [{"role": "user", "content": "x"}, said(use("a"), use("b")), answered("b", "a")],
        False,
    ),
    "results spread over two messages": (
        [{"role": "user", "content": "x"}, said(use("a"), use("b")), answered("a"), answered("b")],
        False,
    ),
    "a result that does not come first": (
        [
            {"role": "user", "content": "x"},
            said(use("a")),
            {"role": "user", "content": [{"type": "text", "text": "t"}, *answered("a")["content"]]},
        ],
        False,
    ),
    "a result by the assistant": (
        [{"role": "user", "content": "x"}, said(use("a")), {**answered("a"), "role": "assistant"}],
        False,
    ),
    "a call by the user": ([{"role": "user", "content": "x"}, {**said(use("a")), "role": "user"}], True),
    "one id for two calls": ([{"role": "user", "content": "x"}, said(use("a"), use("a"))], True),
    "an open call that is not pending": ([{"role": "user", "content": "x"}, said(use("a"))], False),
    "pending without a call": ([{"role": "user", "content": "x"}], True),
    "a result for a call two messages back": (
        [{"role": "user", "content": "x"}, said(use("a")), said({"type": "text", "text": "t"}), answered("a")],
        False,
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_the_api_would_refuse_is_refused_here(store: Store, name: str) -> None:
    """A09: it would be sent, refused with a 400, and sent again."""
    messages, open_calls = CONVERSATIONS[name]
    holder = begun(store)
    store.client.delete(store.keys.messages(T))
    store.client.rpush(store.keys.messages(T), *map(json.dumps, messages))
    pending = [{"id": "a", "name": "append"}] if open_calls else None
    values = {"messageCount": len(messages), "pendingToolUse": json.dumps(pending)}
    store.client.hset(store.keys.checkpoint(T), mapping=values)
    refused(store, holder)
