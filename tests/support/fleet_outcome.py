"""What became of a task: told by itself, by the world outside Redis, and by the model's request log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ops.transcript import blocks_of, check_log
from worker.state.task import Status, Task
from worker.state.views import Event


@dataclass(frozen=True)
class Run:
    """One real execution of a tool."""

    tool: str
    what: str
    key: str
    attempt: int
    pid: int


@dataclass(frozen=True)
class Outcome:
    """All that is known of a task: from itself, from the world and from the model."""

    task: Task
    events: list[Event]
    runs: list[Run]
    requests: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    progress: dict[str, Any]

    @property
    def ran(self) -> Counter[str]:
        """How often each tool really ran."""
        return Counter(run.tool for run in self.runs)

    @property
    def decisions(self) -> dict[str, str]:
        """What was decided for each call, by the tool's name; of several turns, the last one's."""
        names = {block["id"]: block["name"] for message in self.messages for block in blocks_of(message, "tool_use")}
        found = [event.data.get("decisions", {}) for event in self.events if event.kind == "answered"]
        return {names[call]: what for decided in found for call, what in decided.items()}

    @property
    def results(self) -> list[tuple[Any, bool]]:
        """(content, is_error) of each tool_result, in order."""
        blocks = [block for message in self.messages for block in blocks_of(message, "tool_result")]
        return [(block["content"], block.get("is_error", False)) for block in blocks]

    def count(self, kind: str) -> int:
        """How often the task tells of something."""
        return sum(event.kind == kind for event in self.events)

    def problems(self, status: Status = Status.SUCCEEDED) -> list[str]:
        """What no task may ever show, whatever was done to its workers."""
        found = check_log(self.requests)
        if self.task.status is not status:
            found.append(f"{self.task.status} instead of {status}: {self.task.reason}")
        if self.count("ended") != 1:
            found.append(f"ended {self.count('ended')} times")
        keys: dict[str, set[str]] = {}
        for run in self.runs:
            keys.setdefault(f"{run.tool} {run.what}", set()).add(run.key)
        for call, used in keys.items():
            if len(used) > 1:
                found.append(f"{call} ran under {len(used)} idempotency keys")
        for what, times in Counter((run.tool, run.what) for run in self.runs).items():
            if times > 1 and what[0] in ("append", "pay"):
                found.append(f"{' '.join(what)} took effect {times} times")
        return found
