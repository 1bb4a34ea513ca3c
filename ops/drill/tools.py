"""The drill's own tools, one of each nature. What they do to the world is a line in world.jsonl, outside Redis.

Each does its line half-way, so that a kill may come before it, after it, and after the tool has returned.
"""

from __future__ import annotations

import json
import time

from ops.drill.effects import append_line, read_lines
from worker.tools import ToolContext, Verdict, tool

WORLD = "world.jsonl"


@tool(effect="read_only")
def look(item: str, takes_ms: int) -> str:
    """Look something up.

    Args:
        item: What to look up.
        takes_ms: How long that takes.
    """
    time.sleep(takes_ms / 1000)
    return f"{item}: as it was"


@tool(effect="idempotent")
def put(item: str, takes_ms: int, context: ToolContext) -> str:
    """Put something in its place; again, it stays there.

    Args:
        item: What to put.
        takes_ms: How long that takes.
    """
    _change_the_world(context, takes_ms)
    return f"{item} is in its place"


@tool  # unmarked: a side effect
def send(item: str, takes_ms: int, context: ToolContext) -> str:
    """Send something; sent twice, it arrives twice.

    Args:
        item: What to send.
        takes_ms: How long that takes.
    """
    _change_the_world(context, takes_ms)
    return f"{item} is sent"


def _paid(item: str, context: ToolContext) -> Verdict:
    """As a payment provider is asked: by the idempotency key."""
    known = {line["key"] for line in read_lines(context.workspace / WORLD)}
    return Verdict.happened(f"{item} is paid") if context.idempotency_key in known else Verdict.not_happened()


@tool(verify=_paid)
def pay(item: str, takes_ms: int, context: ToolContext) -> str:
    """Pay for something; whether it is paid can be asked.

    Args:
        item: What to pay for.
        takes_ms: How long that takes.
    """
    _change_the_world(context, takes_ms)
    return f"{item} is paid"


def _change_the_world(context: ToolContext, takes_ms: int) -> None:
    time.sleep(takes_ms / 2000)
    line = {"tool": context.tool, "task": context.task_id, "call": context.call_id, "key": context.idempotency_key}
    append_line(context.workspace / WORLD, json.dumps(line))
    time.sleep(takes_ms / 2000)
