"""The checkpoint: decoded strictly, refused in plain words, never guessed around.

Exactly two shapes exist. Point A: the last message is the assistant's and `pendingToolUse` names its calls.
Point B (and the start): `pendingToolUse` is null and every call in the history has its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.errors import CheckpointDamaged, CheckpointTooNew
from worker.state.codec import decode
from worker.state.ledger import Call

VERSION = 1

Message = dict[str, Any]


@dataclass
class Checkpoint:
    """Progress of a task. `tokens_used`: the API's usage counters, summed; `total_tokens`: what counts against
    a limit, input (cached or not) plus output."""

    seq: int = 0
    turns: int = 0
    tokens_used: dict[str, int] = field(default_factory=dict)
    total_tokens: int = 0
    messages: list[Message] = field(default_factory=list)
    pending: tuple[Call, ...] = ()
    stop_reason: str = ""
    server_run_id: str = ""


def read_checkpoint(raw: Mapping[bytes, bytes], documents: Sequence[bytes]) -> Checkpoint:
    """Decode a stored checkpoint; raises CheckpointTooNew or CheckpointDamaged and changes nothing."""
    _check_version(raw.get(b"version"))
    try:
        count, turns = _count(raw[b"messageCount"]), _count(raw[b"turns"])
        total, seq = _count(raw[b"totalTokens"]), _count(raw[b"seq"])
        tokens = decode(raw[b"tokensUsed"])
        pending_raw = decode(raw[b"pendingToolUse"])
    except (KeyError, ValueError) as error:
        raise CheckpointDamaged(f"checkpoint: field missing or unreadable: {error}") from None
    if count != len(documents):
        raise CheckpointDamaged(f"checkpoint: messageCount says {count}, {len(documents)} messages are stored")
    messages = [_read_message(number, data) for number, data in enumerate(documents)]
    problem = find_broken_pairing(messages, open_calls=pending_raw is not None)
    if problem:
        raise CheckpointDamaged(f"checkpoint: {problem}")
    pending = tool_calls(messages[-1], turns) if pending_raw is not None else ()
    if pending_raw is not None and pending_raw != pending_document(pending):
        raise CheckpointDamaged("checkpoint: pendingToolUse does not name the calls of the last message")
    if not isinstance(tokens, dict) or not all(type(number) is int for number in tokens.values()):
        raise CheckpointDamaged("checkpoint: tokensUsed is not a table of counters")
    return Checkpoint(
        seq=seq,
        turns=turns,
        tokens_used=tokens,
        total_tokens=total,
        messages=messages,
        pending=pending,
        stop_reason=raw.get(b"stopReason", b"").decode("utf-8", "replace"),
        server_run_id=raw.get(b"serverRunId", b"").decode("utf-8", "replace"),
    )


def tool_calls(message: Message, turn: int) -> tuple[Call, ...]:
    """The tool_use blocks of an assistant message, in order."""
    return tuple(
        Call(turn, block["id"], block["name"], block["input"])
        for block in message["content"]
        if isinstance(block, dict) and block.get("type") == "tool_use"
    )


def pending_document(calls: Sequence[Call]) -> list[dict[str, str]]:
    """What `pendingToolUse` holds: names and ids; the inputs are in the last message already."""
    return [{"id": call.id, "name": call.name} for call in calls]


def find_broken_pairing(messages: Sequence[Message], *, open_calls: bool) -> str | None:
    """The first thing wrong with the conversation, in words, or None.

    `open_calls`: the last message's calls have no results yet (point A).
    """
    if not messages or messages[0]["role"] != "user":
        return "the conversation does not begin with a user message"
    if open_calls and not tool_use_ids(messages[-1]):
        return "pendingToolUse is set and the last message makes no call"
    for number, message in enumerate(messages):
        last = number == len(messages) - 1
        previous = messages[number - 1] if number else None
        expected = tool_use_ids(previous) if previous else []
        found = _result_ids(message)
        if found != expected:
            return f"message {number} answers the calls {found}, the message before it makes the calls {expected}"
        if found and message["role"] != "user":
            return f"message {number} answers calls and is not the user's"
        made = tool_use_ids(message)
        if made and message["role"] != "assistant":
            return f"message {number} makes tool calls and is not the assistant's"
        if len(set(made)) != len(made):
            return f"message {number} uses one tool_use id twice"
        if made and last and not open_calls:
            return "the last message makes tool calls and pendingToolUse is null"
    return None


def tool_use_ids(message: Message) -> list[str]:
    return [block["id"] for block in _blocks(message) if block.get("type") == "tool_use"]


def _result_ids(message: Message) -> list[Any]:
    """Ids of the tool_result blocks; one that does not come first in its message spoils the list."""
    ids: list[Any] = []
    others = False
    for block in _blocks(message):
        if block.get("type") == "tool_result":
            ids.append("(not first)" if others else block.get("tool_use_id"))
        else:
            others = True
    return ids


def _blocks(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _check_version(raw: bytes | None) -> None:
    if raw == str(VERSION).encode():
        return
    if raw is not None and raw.isdigit() and len(raw) < 10 and int(raw) > VERSION:
        raise CheckpointTooNew(f"checkpoint version {int(raw)}: this worker reads version {VERSION}")
    shown = "missing" if raw is None else repr(raw[:40].decode("utf-8", "replace"))
    raise CheckpointDamaged(f"checkpoint version {shown}: this worker reads version {VERSION}")


def _count(raw: bytes) -> int:
    """Digits and nothing else: int() alone would take "1_0", "+1" and " 1 " too."""
    if not raw.isdigit():
        raise ValueError(f"{raw[:40]!r} is not a number")
    return int(raw)


def _read_message(number: int, data: bytes) -> Message:
    try:
        message = decode(data)
    except ValueError as error:
        raise CheckpointDamaged(f"checkpoint: message {number} is not readable: {error}") from None
    good = (
        isinstance(message, dict)
        and message.get("role") in ("user", "assistant")
        and isinstance(message.get("content"), str | list)
        and bool(message["content"])
    )
    blocks = message["content"] if good and isinstance(message["content"], list) else []
    if not good or not all(_is_sound(block) for block in blocks):
        raise CheckpointDamaged(f"checkpoint: message {number} is not a message")
    return dict(message)


def find_unsound(message: Message) -> str | None:
    """Why a model's message cannot become part of the conversation, in words, or None: what is stored at point A must
    be what the next holder accepts."""
    if not all(_is_sound(block) for block in message["content"]):
        return "a block has no type, a text no text, or a call no id, name or input"
    if _result_ids(message):
        return "it holds results of tools, which are ours to give"
    made = tool_use_ids(message)
    return "two of its calls have the same id" if len(set(made)) != len(made) else None


def _is_sound(block: Any) -> bool:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        return False
    if block["type"] == "text":
        return isinstance(block.get("text"), str)
    if block["type"] != "tool_use":
        return True
    return all(isinstance(block.get(key), str) for key in ("id", "name")) and isinstance(block.get("input"), dict)
