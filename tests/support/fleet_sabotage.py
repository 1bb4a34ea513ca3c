"""Tools module that takes one protection away at import: `FLEET_SABOTAGE=<name>`. Shows that a test can go red.

Never imported by anything but a worker of a test that asks for it.
"""

from __future__ import annotations

import os
from typing import Any

from tests.support.fleet_tools import append, explode, pay, put, read
from worker.answers import Answers
from worker.crashpoints import POINTS, crash_point
from worker.reconcile import Decision
from worker.state import guards, slots, standing
from worker.state.ledger import Call
from worker.state.store import Store
from worker.tools import Tool, ToolResult

__all__ = ["append", "explode", "pay", "put", "read"]


def _no_start_marks() -> None:
    """A call leaves no trace that it may have run."""
    Store.mark_started = lambda self, holder, call, effect: None  # type: ignore[method-assign]


def _record_first() -> None:
    """The ledger says that a call ran before it has run: the reversed order."""
    run = Tool.run
    record = Answers._record

    def recorded_before_run(self: Answers, call: Call, tool: Tool, decision: Decision) -> ToolResult:
        record(self, call, ToolResult(f"{call.name} is as good as done"), decision)
        return run(tool, call.input, self._context_for(call, tool))

    Answers._run = recorded_before_run  # type: ignore[method-assign]


def _claim_anything() -> None:
    """Whoever gets a delivery takes the task, whatever its state and whoever holds it."""
    slots.refusal = lambda at, delivery: None if at.exists else standing.Refused("no such task")


def _point_after_finish() -> None:
    """No sabotage but one more crash point, where only RQ has work left: `after-finish`."""
    POINTS["after-finish"] = "the task is closed, RQ does not know yet"
    finish = Store.finish

    def finish_and_pass(self: Store, *args: Any, **kwargs: Any) -> None:
        finish(self, *args, **kwargs)
        crash_point("after-finish")

    Store.finish = finish_and_pass  # type: ignore[method-assign]


def _blind_commits() -> None:
    """A holder does not recognise its own commit when it looks again after a lost reply."""
    text = guards.text

    def text_but_stamps(raw: bytes | None) -> str:
        found = text(raw)
        return "?" if found.count(":") == 3 else found

    guards.text = text_but_stamps


SABOTAGES: dict[str, Any] = {
    "no-start-marks": _no_start_marks,
    "record-first": _record_first,
    "claim-anything": _claim_anything,
    "blind-commits": _blind_commits,
    "point-after-finish": _point_after_finish,
}
SABOTAGES[os.environ["FLEET_SABOTAGE"]]()
