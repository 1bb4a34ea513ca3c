"""No progress: a conversation that goes in circles, and an attempt that is alive and gets nowhere.

Both are warned of first and parked at twice the bound, for a person to look at (BATON_STUCK: off, warn or park). What
is counted is read off the conversation and the holder, so that a crash forgets nothing and nothing needs to be kept.
"""

from __future__ import annotations

import copy
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from worker.errors import BatonError, CancelRequested, LeaseLost, MustWait
from worker.log import event
from worker.settings import Settings
from worker.state.checkpoint import Checkpoint, Message
from worker.state.lease import Holder
from worker.state.store import Store
from worker.state.task import ParkNote

log = logging.getLogger(__name__)

WAITS_FOR = "person"
NAMES_MAX = 5
CIRCLES_MAX = 10  # looked back at, whatever the length of the history
PATIENCE_S = 2.0  # whoever keeps leases must not wait longer than that for one of them


@dataclass(frozen=True)
class Bounds:
    """`how`: off, warn or park. `turns`: the same round so often is warned of; `s`: so long without a commit."""

    how: str = "off"
    turns: int = 10
    s: float = 3_600

    @classmethod
    def of(cls, settings: Settings) -> Bounds:
        return cls(settings.stuck, settings.stuck_repeats, settings.stuck_s)


def rounds_alike(messages: Sequence[Message], at_most: int) -> int:
    """How many rounds in a row, up to now, made the same calls and got the same results; 0 if the last message gives no
    results. Looks at the tail alone."""
    last = _round(messages, len(messages))
    if not last[0]:
        return 0
    count = 1
    while count < at_most and _round(messages, len(messages) - 2 * count) == last:
        count += 1
    return count


def look_back(store: Store, holder: Holder, now: Checkpoint, parked: ParkNote, bounds: Bounds) -> None:
    """Before a model call: warn of a conversation that goes in circles, or raise MustWait. After each park it may go as
    many rounds again, for a person has said so; when that has been said often enough, no further one."""
    if bounds.how == "off" or parked.turns == now.turns:  # looked at before it was parked here
        return
    circle = 2 * bounds.turns
    count = rounds_alike(now.messages, circle * CIRCLES_MAX)
    if count == 0 or count % bounds.turns:
        return
    what = f"{_names(now.messages)} was called with the same input and the same result {count} times in a row"
    if count % circle == bounds.turns:
        event(log, "stuck", level=logging.WARNING, task=holder.task_id, turn=now.turns, why=what)
        store.warn(holder, "stuck", why=what, turn=now.turns)
    elif bounds.how == "park":
        raise MustWait(f"no progress: {what}; {_command(holder)}", None, waits_for=WAITS_FOR)


class Watchdog:
    """Looks at a holder after each renewal of its lease, in the thread that keeps it. `store`: that thread's. `end`:
    ends this process, if it was forked for this one task; else the thread is fenced and left where it hangs."""

    def __init__(self, store: Store, bounds: Bounds, end: Callable[[], None] | None = None) -> None:
        self._store = copy.copy(store)
        self._store.policy = replace(store.policy, holder_patience_s=PATIENCE_S)
        self._bounds = bounds
        self._end = end

    def look(self, holder: Holder) -> None:
        idle_s = holder.clock.monotonic() - holder.progressed_at
        # Whoever holds `writing` is in the middle of a commit, or letting go.
        if self._bounds.how == "off" or idle_s < self._bounds.s or holder.released or holder.writing.locked():
            return
        try:
            self._act(holder, idle_s)
        except LeaseLost:  # its task is another's by now; what hangs still keeps a worker from working
            if self._end is not None and self._bounds.how == "park" and idle_s >= 2 * self._bounds.s:
                event(log, "stuck-ended", level=logging.ERROR, task=holder.task_id, why=f"no sign for {idle_s:.0f} s")
                self._end()
        except BatonError as error:
            event(log, "stuck-not-told", level=logging.WARNING, task=holder.task_id, why=error)

    def _act(self, holder: Holder, idle_s: float) -> None:
        what = f"nothing was saved for {idle_s:.0f} s, and its worker is alive"
        if holder.warned_of != holder.progressed_at:
            self._store.warn(holder, "stuck", why=what)
            holder.warned_of = holder.progressed_at
            event(log, "stuck", level=logging.WARNING, task=holder.task_id, why=what)
        if self._bounds.how != "park" or idle_s < 2 * self._bounds.s:
            return
        note = ParkNote(spends_attempt=False, waits_for=WAITS_FOR)
        try:
            self._store.park(
                holder, f"no progress: {what}; {_command(holder)}", wait_ms=None, note=note, midway=True
            )  # fmt: skip
        except CancelRequested:
            # It never came to hear of it. Its process ends, and whoever finds it gone ends the task; a thread cannot
            # be ended: its task stays until the process is.
            event(log, "stuck-cancelled", level=logging.ERROR, task=holder.task_id, why=what)
        else:
            event(log, "parked", level=logging.ERROR, task=holder.task_id, why=what)
        if self._end is not None:
            self._end()


def end_horse() -> None:
    """SIGKILL: what hangs may sit in C code or in a `finally`, and what it would still do is of no use to anybody."""
    os.kill(os.getpid(), signal.SIGKILL)


def _command(holder: Holder) -> str:
    return f"`baton show {holder.task_id}` tells what it did, `baton retry {holder.task_id}` lets it go on"


def _round(messages: Sequence[Message], end: int) -> tuple[list[Any], list[Any]]:
    """Calls and results of the round whose results are message `end` - 1, without ids; both empty if there is none."""
    if end < 2:
        return ([], [])
    calls = [(block["name"], block["input"]) for block in _blocks(messages[end - 2], "tool_use")]
    results = [(block.get("content"), block.get("is_error")) for block in _blocks(messages[end - 1], "tool_result")]
    return (calls, results)


def _blocks(message: Message, kind: str) -> list[Any]:
    content = message["content"]
    return [block for block in content if block.get("type") == kind] if isinstance(content, list) else []


def _names(messages: Sequence[Message]) -> str:
    names = list(dict.fromkeys(block["name"] for block in _blocks(messages[-2], "tool_use")))
    return ", ".join(names[:NAMES_MAX]) + (" …" if len(names) > NAMES_MAX else "")
