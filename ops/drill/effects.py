"""The effect log: what really ran, written down outside Redis, each line on disk before anything else happens.

A line `began` just before a tool runs, `did` just after it has returned, `asked` after its `verify` was asked. It is
the drill's oracle: whatever a task says of itself is held against it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.state.codec import digest
from worker.tools import Tool, ToolContext, ToolResult, Verdict

FILE = "effects.jsonl"
TOOLS_VARIABLE, LOG_VARIABLE = "DRILL_TOOLS", "DRILL_EFFECTS"


def append_line(path: Path, line: str) -> None:
    """One write to a file opened for appending, then fsync: lines of several processes never mix, and a killed
    process's last line is whole."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, line.encode() + b"\n")
        os.fsync(file)
    finally:
        os.close(file)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log that others may be writing; no file is an empty log."""
    if not path.exists():
        return []
    whole, _, _unfinished = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def record(tool: Tool, log: Path) -> Tool:
    """Make this tool tell of each of its real runs. Changes the object, so that it is recorded wherever it is used."""
    run: Callable[[Any, ToolContext], ToolResult] = tool.run
    ask: Callable[[Any, ToolContext], Verdict] = tool.ask

    def recorded_run(input: Any, context: ToolContext) -> ToolResult:
        _tell(log, "began", tool, context)
        result = run(input, context)
        _tell(log, "did", tool, context, content=fingerprint(result.content), isError=result.is_error)
        return result

    def recorded_ask(input: Any, context: ToolContext) -> Verdict:
        verdict = ask(input, context)
        content = fingerprint(verdict.result) if verdict.outcome == "happened" else ""
        _tell(log, "asked", tool, context, outcome=verdict.outcome, content=content)
        return verdict

    tool.run = recorded_run  # type: ignore[method-assign]  # of this one object
    tool.ask = recorded_ask  # type: ignore[method-assign]
    return tool


def fingerprint(content: Any) -> str:
    """Names a result's content; equal contents have equal ones."""
    return digest(content)


def _tell(log: Path, what: str, tool: Tool, context: ToolContext, **more: Any) -> None:
    line = {
        "what": what,
        "at": time.time(),
        "mono": time.monotonic(),
        "task": context.task_id,
        "turn": context.turn,
        "call": context.call_id,
        "tool": tool.name,
        "effect": tool.effect.value,
        "key": context.idempotency_key,
        "attempt": context.attempt,
        "epoch": context.epoch,
        "pid": os.getpid(),
        "worker": os.getppid(),
        **more,
    }
    append_line(log, json.dumps(line))
