"""Events in words, for a person who watches a task.

All that comes from a model or a tool is cleaned for the terminal on its way through here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from enqueue.plain import duration, one_line
from worker.state.views import Event

# What became of a pending call when a resumed attempt looked at it; plain runs have told of themselves already.
_DECIDED = {
    "reuse": "ledger hit, result reused, not run again",
    "unknown": "state unknown, not run again",
    "hold": "state unknown, waits for a person's decision",
    "no such tool": "there is no such tool; the model is told",
    "resolved: happened": "a person said that it happened, not run again",
    "resolved: not_happened": "a person said that it had not happened",
    "resolved: report": "a person could not tell; the model is told",
    "verify: happened": "asked the world: it happened, not run again",
    "verify: not_happened": "asked the world: it had not happened",
    "verify: unknown": "asked the world: it cannot tell",
}

# How a call came to run, where that is worth a word.
_RAN = {
    "rerun": " (run again: a repetition does no harm)",
    "verify": " (asked the world: it happened before, not run again)",
}


class Narrator:
    """Turns one task's events, in order, into lines. Remembers names of calls: later events give only their ids."""

    def __init__(self) -> None:
        self._names: dict[tuple[Any, Any], str] = {}

    def lines(self, event: Event) -> list[str]:
        """No line, one, or several."""
        name = "on_" + event.kind.replace("-", "_")
        tell: Callable[[dict[str, Any], Event], list[str]] | None = getattr(self, name, None)
        try:
            if tell is not None:
                return tell(event.data, event)
        except (KeyError, TypeError, ValueError, AttributeError):
            pass  # from another version, perhaps: say what is there
        return [one_line(f"{event.kind} {json.dumps(event.data)}")]

    # -- one method per kind of event -----------------------------------------------------------------------

    def on_created(self, data: dict[str, Any], event: Event) -> list[str]:
        if data.get("wakeAtMs"):
            return [f"accepted; starts in {duration((data['wakeAtMs'] - event.at_ms) / 1000)}"]
        return ["accepted and queued"]

    def on_claimed(self, data: dict[str, Any], event: Event) -> list[str]:
        if data["epoch"] == 1:
            return [f"started by attempt {data['attempt']}"]
        return [f"resumed by attempt {data['attempt']} (epoch {data['epoch']})"]

    def on_responded(self, data: dict[str, Any], event: Event) -> list[str]:
        calls = [one_line(name, 64) for name in data.get("calls", [])]
        tries = f", {data['tries']} tries" if data.get("tries", 1) > 1 else ""
        did = f"the model calls {', '.join(calls)}" if calls else f"the model ended with {_word(data['stopReason'])}"
        lines = [f"turn {data['turn']}: {did} ({data['tokens']} tokens{tries})"]
        if said := one_line(data.get("text", ""), 200):
            lines.append(f"turn {data['turn']}: it says: {said}")
        return lines

    def on_call_started(self, data: dict[str, Any], event: Event) -> list[str]:
        return [f"{self._named(data)}: started"]

    def on_call_recorded(self, data: dict[str, Any], event: Event) -> list[str]:
        outcome = "failed, the model is told" if data["isError"] else "done"
        return [f"{self._named(data)}: {outcome}{_RAN.get(data.get('decision', ''), '')}"]

    def on_answered(self, data: dict[str, Any], event: Event) -> list[str]:
        lines = []
        for call, decision in data.get("decisions", {}).items():
            if decision in _DECIDED:
                lines.append(f"{self._names.get((data['turn'], call)) or _word(call)}: {_DECIDED[decision]}")
        return [*lines, f"turn {data['turn']}: all results saved"]

    def on_parked(self, data: dict[str, Any], event: Event) -> list[str]:
        until = "until a person decides"
        if data.get("wakeAtMs"):
            until = f"for {duration((data['wakeAtMs'] - event.at_ms) / 1000)}"
        if str(data.get("waitsFor", "")).startswith("slot:"):
            until = "until it is its turn"
        return [f"put aside {until}: {one_line(data['reason'], 400)}"]

    def on_stuck(self, data: dict[str, Any], event: Event) -> list[str]:
        return [f"no progress: {one_line(data['why'], 400)}"]

    def on_woken(self, data: dict[str, Any], event: Event) -> list[str]:
        return ["its time has come; queued again"]

    def on_handed_over(self, data: dict[str, Any], event: Event) -> list[str]:
        why = one_line(data.get("why") or data["proof"])
        if "delivery" not in data:  # its work-horse was ended for a person who had stopped the job
            return [f"let go of: {why}"]
        given_up = " (a model call was given up for it)" if data.get("abandoned") else ""
        return [f"handed over to another worker: {why}{given_up}"]

    def on_recovered(self, data: dict[str, Any], event: Event) -> list[str]:
        goes_on = "the task is queued again" if "delivery" in data else "the task is not queued again"
        return [f"worker died ({one_line(data['proof'])}); {goes_on}"]

    def on_redelivered(self, data: dict[str, Any], event: Event) -> list[str]:
        return ["its job was lost from the queue; queued again"]

    def on_resolved(self, data: dict[str, Any], event: Event) -> list[str]:
        what = _word(data["outcome"]).replace("_", " ")
        return [f"{one_line(data['by'])} says of call {_word(data['call'])}: {what}; queued again"]

    def on_retried(self, data: dict[str, Any], event: Event) -> list[str]:
        return [f"queued again by {one_line(data['by'])}"]

    def on_cancel_asked(self, data: dict[str, Any], event: Event) -> list[str]:
        return [f"asked to stop by {one_line(data['by'])}"]

    def on_ended(self, data: dict[str, Any], event: Event) -> list[str]:
        return [ending(data["status"], data.get("reason", ""))]

    def _named(self, data: dict[str, Any]) -> str:
        name = self._names[data["turn"], data["call"]] = one_line(data["name"], 64)
        return name


def ending(status: str, reason: str) -> str:
    """The end of a task in a line: its status, and why unless that goes without saying."""
    why = one_line(reason, 400)
    if status == "cancelled":
        return f"cancelled by {why or 'somebody'}"
    return f"{status}: {why}" if why and why != "end_turn" else status


def clock_time(ms: float) -> str:
    """Local time of day."""
    return datetime.fromtimestamp(ms / 1000).strftime("%H:%M:%S")


def _word(value: object) -> str:
    return one_line(str(value), 64)
