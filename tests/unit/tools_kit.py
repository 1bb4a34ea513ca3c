"""What the tests of the tools share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from worker.errors import CancelRequested, LeaseLost
from worker.settings import load_settings
from worker.tools import Tool, ToolContext, ToolResult


class JobTimeout(Exception):
    """Stands for RQ's JobTimeoutException, which is an Exception too."""


STOPS = [LeaseLost, CancelRequested, SystemExit, KeyboardInterrupt, JobTimeout]


def context(
    workspace: Path = Path("nowhere"), *, settings: dict[str, Any] | None = None, **changes: Any
) -> ToolContext:
    values: dict[str, Any] = {
        "task_id": "t1",
        "call_id": "toolu_1",
        "tool": "x",
        "turn": 1,
        "attempt": 1,
        "epoch": 1,
        "idempotency_key": "t1:1:toolu_1",
        "workspace": workspace,
        "result_max_bytes": 10_000,
        "settings": load_settings({}, **(settings or {})),
        "control_flow": (JobTimeout,),
    }
    return ToolContext(**{**values, **changes})


def answer(tool: Tool, context: ToolContext, **input: Any) -> str:
    """The text of a call that went well."""
    result = tool.run(input, context)
    assert not result.is_error, result.content
    assert isinstance(result.content, str)
    return result.content


def refusal(tool: Tool, context: ToolContext, **input: Any) -> str:
    """The text of a call that was answered with an error."""
    result: ToolResult = tool.run(input, context)
    assert result.is_error, result.content
    assert isinstance(result.content, str)
    return result.content


SECRET = "the secret outside"


def make_workspace(tmp_path: Path) -> Path:
    """A workspace with two text files, and with everything that could lead out of it or block."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "notes").mkdir()
    (inside / "notes" / "a.txt").write_text("one\ntwo\nthree\n")
    (inside / "notes" / "b.md").write_text("One more\n")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text(SECRET)
    (inside / "out_file").symlink_to(outside / "secret.txt")
    (inside / "out_dir").symlink_to(outside)
    (inside / "loop").symlink_to("loop")
    (inside / "in_link").symlink_to("notes/a.txt")
    (inside / "dangling_out").symlink_to(outside / "new.txt")
    os.mkfifo(inside / "fifo")
    return inside
