"""A tool that starts processes of its own, as shells and browsers do."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support import fleet_tools
from worker.tools import ToolContext, tool


def pids_of(workspace: Path, task_id: str) -> list[int]:
    """What `spawn` or `background` has started for the task; empty until all of it runs."""
    noted = workspace / f"{task_id}.pids"
    return [int(word) for word in noted.read_text().split()] if noted.exists() else []


def _start(context: ToolContext) -> None:
    children = [subprocess.Popen(["sleep", "300"], start_new_session=session) for session in (False, True)]
    draft = context.workspace / f"{context.task_id}.draft"
    draft.write_text(" ".join(str(child.pid) for child in children))
    draft.rename(context.workspace / f"{context.task_id}.pids")


@tool
def spawn(text: str, context: ToolContext) -> str:
    """Start two processes, one in a session of its own, and work until the gate opens."""
    _start(context)
    return fleet_tools.append.run({"text": text, "hold": True}, context).content  # type: ignore[return-value]


@tool
def background(text: str, context: ToolContext) -> str:
    """Start two processes and come back at once."""
    _start(context)
    return fleet_tools.append.run({"text": text}, context).content  # type: ignore[return-value]
