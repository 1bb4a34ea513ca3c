"""Tools whose every real run leaves a line in effects.log, outside Redis: one of each nature, and some that misbehave.

The log is the oracle of the fleet and crash tests: whatever the task says of itself, this is what happened.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from pathlib import Path

from tests.support.logs import json_lines
from worker.tools import ToolContext, Verdict, tool

EFFECTS = "effects.log"
WAIT_MAX_S = 60


def gate_of(workspace: Path, task_id: str) -> Path:
    """The file that `append(hold=True)` of this task waits for."""
    return workspace / f"{task_id}.go"


@tool(effect="read_only")
def read(name: str, context: ToolContext) -> str:
    """Read something."""
    _ran("read", name, context)
    return f"{name}: nothing new"


@tool(effect="idempotent")
def put(name: str, context: ToolContext) -> str:
    """Put something in its place; putting it there again changes nothing."""
    _ran("put", name, context)
    return f"put {name}"


@tool  # unmarked: a side effect
def append(text: str, context: ToolContext, hold: bool = False, takes_s: float = 0) -> str:
    """Append a line to a file.

    Args:
        text: The line.
        hold: Come back only when the gate of the task is open.
        takes_s: Come back so much later: a window for kills at random moments.
    """
    _ran("append", text, context)
    time.sleep(takes_s)
    until = time.monotonic() + WAIT_MAX_S
    while hold and not gate_of(context.workspace, context.task_id).exists():
        if time.monotonic() > until:
            raise TimeoutError("nobody opened the gate")
        time.sleep(0.02)
    return f"appended {text}"


@tool(interruptible=True)  # a side effect, once it has pondered
def ponder(text: str, context: ToolContext) -> str:
    """Think until the gate of the task is open, then append a line."""
    _ran("ponder", text, context)
    until = time.monotonic() + WAIT_MAX_S
    while not gate_of(context.workspace, context.task_id).exists() and time.monotonic() < until:
        context.stop_if_asked()
        time.sleep(0.02)
    _ran("append", text, context)
    return f"appended {text}"


def _paid(item: str, context: ToolContext) -> Verdict:
    """Asks the world, as a payment provider is asked by the idempotency key."""
    for line in json_lines(context.workspace / EFFECTS):
        if line["tool"] == "pay" and line["key"] == context.idempotency_key:
            return Verdict.happened(f"paid {item}")
    return Verdict.not_happened()


@tool(verify=_paid)
def pay(item: str, context: ToolContext) -> str:
    """Pay for something."""
    _ran("pay", item, context)
    return f"paid {item}"


@tool(effect="read_only")
def explode(name: str, context: ToolContext) -> str:
    """Kill the process it runs in, as an image decoder might; read-only, so it is run again after each crash."""
    _ran("explode", name, context)
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@tool  # a side effect
def hog(text: str, context: ToolContext, keeps_gil: bool = True) -> str:
    """Take effect, then let no other thread of the process run for FLEET_HOG_S seconds: one call of `re` that
    backtracks, as a careless pattern does. Without `keeps_gil` it takes as long and lets them run.
    """
    _ran("append", text, context)
    seconds = float(os.environ["FLEET_HOG_S"])
    if not keeps_gil:
        time.sleep(seconds)
        return f"appended {text}"
    began = time.monotonic()
    letters = 16
    while True:  # each letter doubles the time, on any machine: the last call is the long one
        since = time.monotonic()
        re.match(r"(a+)+$", "a" * letters + "b")
        took = time.monotonic() - since
        if took >= seconds:
            return f"appended {text} after {time.monotonic() - began:.1f} s"
        letters += max(1, math.ceil(math.log2(seconds / took)))


def _ran(tool_name: str, what: str, context: ToolContext) -> None:
    line = {
        "task": context.task_id,
        "tool": tool_name,
        "what": what,
        "key": context.idempotency_key,
        "attempt": context.attempt,
        "pid": os.getpid(),
    }
    # One write to a file opened for appending: lines of several processes never mix.
    file = os.open(context.workspace / EFFECTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
        os.fsync(file)
    finally:
        os.close(file)
