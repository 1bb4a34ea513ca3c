"""Is a conversation one the Messages API accepts? As strict as the API, stricter where that hides a mistake.

Pure: takes request bodies, gives problems in words (none means valid). The scripted model refuses what
`check_request` finds; drills and tests run `check_log` over everything a task ever sent. A rule of our
own: an assistant message's calls are answered in ONE user message, results first, in the calls' order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

# What POST /v1/messages takes in version 2026-10-21 without a beta header.
TOP_LEVEL = frozenset(
    {
        *("model", "max_tokens", "messages", "system", "tools", "tool_choice", "thinking", "stream"),
        *("stop_sequences", "metadata", "cache_control", "output_config", "container", "diagnostics"),
        *("service_tier", "speed", "inference_geo", "user_profile_id", "workspace_id"),
    }
)
_ID = re.compile(r"[A-Za-z0-9_-]+")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")

Json = dict[str, Any]


def check_request(body: Json) -> list[str]:
    """Everything wrong with one request body; empty if it is valid."""
    problems = list(_check_frame(body))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return [*problems, "messages: at least one message is required"]
    for index, message in enumerate(messages):
        problems += [f"messages.{index}{problem}" for problem in _check_message(message)]
    if problems:
        return problems  # the rules below read fields that were just found to be missing
    if messages[0]["role"] != "user":
        problems.append("messages: first message must use the `user` role")
    for index, message in enumerate(messages):
        before = messages[index - 1] if index else None
        after = messages[index + 1] if index + 1 < len(messages) else None
        problems += [f"messages.{index}: {problem}" for problem in _check_results(message, before)]
        problems += [f"messages.{index}: {problem}" for problem in _check_calls(message, after)]
    return problems


def check_log(bodies: Sequence[Json]) -> list[str]:
    """Everything wrong with the requests of one task, in the order they were sent.

    Takes request bodies, or lines of a scripted model's log ({"body": …, "response": …}). Each body must
    be valid; each one's messages must begin with, byte for byte, those of the one before, all else being
    equal (sending the same again is a retry); what the model answered must come back as it was.
    """
    lines = [line if "body" in line else {"body": line} for line in bodies]
    problems = []
    for index, line in enumerate(lines):
        problems += [f"request {index}: {problem}" for problem in check_request(line["body"])]
    for index in range(1, len(lines)):
        before, now = lines[index - 1]["body"], lines[index]["body"]
        problems += [f"request {index}: {problem}" for problem in _check_growth(before, now)]
    return problems + list(_check_echoes(lines))


def first_text(body: Json) -> str:
    """The text of the first user message: what the task was asked. "" if there is none."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        return ""
    return text_of(messages[0].get("content"))


def text_of(content: Any) -> str:
    """The text in a message's or a tool result's content, be it a string or a list of blocks."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    return "".join(
        str(block.get("text", "")) for block in blocks if isinstance(block, dict) and block.get("type") == "text"
    )


def blocks_of(message: Json | None, kind: str) -> list[Json]:
    """The blocks of type `kind` in a message whose content may be a plain string."""
    content = message.get("content") if message else None
    return [b for b in content if b.get("type") == kind] if isinstance(content, list) else []


def _check_frame(body: Json) -> Iterator[str]:
    for key in sorted(body.keys() - TOP_LEVEL):
        yield f"{key}: Extra inputs are not permitted"
    if not isinstance(body.get("model"), str) or not body["model"]:
        yield "model: Field required"
    max_tokens = body.get("max_tokens")
    if type(max_tokens) is not int or max_tokens < 1:
        yield "max_tokens: must be an integer of at least 1"
    if "system" in body:
        yield from (f"system{problem}" for problem in _check_content(body["system"]))
    yield from _check_tools(body.get("tools", []))


def _check_tools(tools: Any) -> Iterator[str]:
    if not isinstance(tools, list):
        yield "tools: Input should be a list"
        return
    names = []
    for index, tool in enumerate(tools):
        name = tool.get("name") if isinstance(tool, dict) else None
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            yield f"tools.{index}.name: String should match pattern '{_TOOL_NAME.pattern}'"
            continue
        names.append(name)
        if "type" not in tool and not isinstance(tool.get("input_schema"), dict):
            yield f"tools.{index}.input_schema: Field required"
    if len(set(names)) != len(names):
        yield "tools: Tool names must be unique."


def _check_message(message: Any) -> Iterator[str]:
    if not isinstance(message, dict):
        yield ": Input should be an object"
        return
    for key in sorted(message.keys() - {"role", "content"}):
        yield f".{key}: Extra inputs are not permitted"
    if message.get("role") not in ("user", "assistant"):
        yield ".role: Input should be 'user' or 'assistant'"
    yield from (f".content{problem}" for problem in _check_content(message.get("content")))


def _check_content(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        if not content.strip():
            yield ": text content blocks must contain non-whitespace text"
        return
    if not isinstance(content, list):
        yield ": Input should be a string or a list of blocks"
        return
    if not content:
        yield ": must not be empty"
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            yield f".{index}.type: Field required"
        else:
            yield from (f".{index}{problem}" for problem in _check_block(block))


def _check_block(block: Json) -> Iterator[str]:
    match block["type"]:
        case "text":
            if not isinstance(block.get("text"), str) or not block["text"].strip():
                yield ".text: text content blocks must contain non-whitespace text"
        case "tool_use":
            if not isinstance(block.get("id"), str) or not _ID.fullmatch(block["id"]):
                yield ".tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'"
            if not isinstance(block.get("name"), str) or not block["name"]:
                yield ".tool_use.name: Field required"
            if not isinstance(block.get("input"), dict):
                yield ".tool_use.input: Input should be an object"
        case "tool_result":
            if not isinstance(block.get("tool_use_id"), str):
                yield ".tool_result.tool_use_id: Field required"
            if "content" in block:
                yield from (f".content{problem}" for problem in _check_content(block["content"]))
            elif block.get("is_error"):
                yield ".tool_result: content cannot be empty if `is_error` is true"


def _check_calls(message: Json, after: Json | None) -> Iterator[str]:
    if message["role"] == "user":
        if blocks_of(message, "tool_use"):
            yield "`tool_use` blocks can only be in `assistant` messages"
        return
    ids = [block["id"] for block in blocks_of(message, "tool_use")]
    if len(set(ids)) != len(ids):
        yield "`tool_use` ids must be unique"
    if not ids:
        return
    answered = {b["tool_use_id"] for b in blocks_of(after, "tool_result")} if _is_user(after) else set()
    if missing := [id_ for id_ in ids if id_ not in answered]:
        yield (
            "`tool_use` ids were found without `tool_result` blocks immediately after: "
            f"{', '.join(missing)}. Each `tool_use` block must have a corresponding `tool_result` block in "
            "the next message."
        )


def _check_results(message: Json, before: Json | None) -> Iterator[str]:
    results = [block["tool_use_id"] for block in blocks_of(message, "tool_result")]
    if not results:
        return
    if message["role"] != "user":
        yield "`tool_result` blocks can only be in `user` messages"
        return
    calls = [b["id"] for b in blocks_of(before, "tool_use")] if before and not _is_user(before) else []
    if orphans := [id_ for id_ in results if id_ not in calls]:
        yield (
            f"unexpected `tool_use_id` found in `tool_result` blocks: {', '.join(orphans)}. Each "
            "`tool_result` block must have a corresponding `tool_use` block in the previous message."
        )
    elif len(set(results)) != len(results):
        yield "each tool_use must have a single result. Found multiple `tool_result` blocks with one id"
    elif set(results) == set(calls) and results != calls:
        yield "`tool_result` blocks are not in the order of their `tool_use` blocks"
    kinds = [block["type"] for block in message["content"]]
    if kinds[: len(results)] != ["tool_result"] * len(results):
        yield "`tool_result` blocks must come first in their message"


def _is_user(message: Json | None) -> bool:
    return message is not None and message["role"] == "user"


def _check_growth(before: Json, now: Json) -> Iterator[str]:
    # `stream` says how the answer travels, not what is asked.
    for key in sorted((before.keys() | now.keys()) - {"messages", "stream"}):
        if _bytes(before.get(key)) != _bytes(now.get(key)):
            yield f"{key} differs from the request before"
    old, new = before.get("messages") or [], now.get("messages") or []
    if len(new) < len(old):
        yield f"messages shrank from {len(old)} to {len(new)}"
    for index, (was, is_) in enumerate(zip(old, new, strict=False)):
        if _bytes(was) != _bytes(is_):
            yield f"messages.{index} differs from the request before"


def _check_echoes(lines: Sequence[Json]) -> Iterator[str]:
    """Each assistant message is, key for key, an answer to the very messages before it."""
    if not any(line.get("response") for line in lines):
        return
    answers: dict[int, list[str]] = {}  # number of messages asked with -> contents answered
    seen = 0  # what is older was compared before, and _check_growth holds it fast
    for index, line in enumerate(lines):
        messages = line["body"].get("messages") or []
        for at in range(seen, len(messages)):
            if at in answers and _same(messages[at].get("content")) not in answers[at]:
                yield f"request {index}: messages.{at} is not what the model answered"
        seen = len(messages)
        if response := line.get("response"):
            answers.setdefault(len(messages), []).append(_same(response.get("content")))


def _bytes(value: Any) -> str:
    return json.dumps(value)


def _same(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
