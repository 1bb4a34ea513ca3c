"""Results for pending calls: reconcile what was begun before, run what was not, record each the moment it returns.

    not read-only:  mark_started → run → record_result
    read-only:                     run → record_result

The order is the guarantee: marked before it can run, recorded only after it has.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from worker.crashpoints import crash_point
from worker.drain import Drain
from worker.errors import Interrupted
from worker.log import event
from worker.reconcile import Decision, Nature, after_asking, decide
from worker.state.codec import Unstorable, digest
from worker.state.lease import Holder
from worker.state.ledger import Call, Entry, Marker, Resolution
from worker.state.store import Store
from worker.tools import Effect, Tool, Toolbox, ToolContext, ToolResult

log = logging.getLogger(__name__)

PARALLEL_MAX = 8
SETTLE_SLICE_S = 0.2

# Constant texts: they become part of the request prefix, which must be the same after every resume.
STATE_UNKNOWN = (
    "The state of this call is unknown: the process running it died after it was started and before its result was "
    "recorded. It may or may not have taken effect, and it was not run again. Check what happened before you repeat it."
)
NOT_EXECUTED = "Not executed: the task was cancelled before this call was started."


@dataclass(frozen=True)
class Held:
    """A person has to say what became of this call before the task can go on."""

    call: Call


@dataclass
class Answers:
    """Answers calls for one holder. `entries` and `markers` are what was stored before this attempt began."""

    store: Store
    holder: Holder
    toolbox: Toolbox
    context: Callable[[Call, Tool, str], ToolContext]
    entries: dict[str, Entry] = field(default_factory=dict)
    markers: dict[str, Marker] = field(default_factory=dict)
    markers_trusted: bool = True
    decided: dict[str, str] = field(default_factory=dict)
    resolutions: dict[str, Resolution] = field(default_factory=dict)
    resumed: bool = False  # the calls were pending when this attempt began
    settle_s: float = 0  # what a process sent just before it died may take effect for so long
    began: float = field(default_factory=time.monotonic)
    recorded: int = 0  # results written to the ledger in this attempt
    drain: Drain = field(default_factory=Drain)

    def to(self, calls: Sequence[Call]) -> list[dict[str, Any]] | Held:
        """One tool_result block per call, in order. Neighbouring read-only calls run side by side, others alone.
        Leaves in `decided` what was decided for each call, by its id."""
        self.decided = {}
        blocks: list[dict[str, Any]] = []
        for side_by_side, group in itertools.groupby(calls, key=self._is_read_only):
            batch = list(group)
            self.drain.leave()
            done = self._together(batch) if side_by_side and len(batch) > 1 else map(self._alone, batch)
            for call, result in zip(batch, done, strict=True):
                if isinstance(result, Held):
                    return result
                blocks.append(result_block(call, result))
        if self.resumed:
            for call in calls:
                decision = self.decided.get(call.id, "")
                task = self.holder.task_id
                event(log, "reconciled", task=task, turn=call.turn, call=call.id, name=call.name, decision=decision)
        # These calls are over; nothing of them is known of the next ones.
        self.entries, self.markers, self.markers_trusted = {}, {}, True
        self.resolutions, self.resumed = {}, False
        return blocks

    def without_running(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """What can be said of each call without running any, for a task that is being cancelled."""
        return [result_block(call, self._as_it_stands(call)) for call in calls]

    def _alone(self, call: Call) -> ToolResult | Held:
        self.drain.leave()  # what is done is recorded, and this call is not begun
        return self._answer(call)

    def _answer(self, call: Call) -> ToolResult | Held:
        self.holder.watch()
        decision = self._decide(call)
        tool = self.toolbox.get(call.name)
        if (resolution := self.resolutions.get(call.id)) and decision not in (Decision.REUSE, Decision.RUN):
            self.decided[call.id] = f"resolved: {resolution.outcome}"
            if resolution.outcome == "happened":
                return self._record(call, ToolResult(resolution.text), decision)
            decision = Decision.RUN if resolution.outcome == "not_happened" and tool else Decision.UNKNOWN
        elif decision is Decision.VERIFY and tool is not None:
            verdict = tool.ask(call.input, self._context_for(call, tool))
            if verdict.outcome == "not_happened" and self._let_settle():
                verdict = tool.ask(call.input, self._context_for(call, tool))
            event(log, "verified", task=self.holder.task_id, call=call.id, outcome=verdict.outcome)
            decision = after_asking(verdict.outcome, self.markers.get(call.id), nature_of(tool))
            if verdict.outcome != "not_happened" or decision is Decision.RUN:  # else "not yet" was not enough
                self.decided[call.id] = f"{Decision.VERIFY}: {verdict.outcome}"
            if decision is Decision.VERIFY:
                return self._record(call, ToolResult(verdict.result), decision)
        self.decided.setdefault(call.id, decision.value)
        match decision:
            case Decision.REUSE:
                entry = self.entries[call.id]
                return ToolResult(entry.content, entry.is_error)
            case Decision.RUN | Decision.RERUN if tool is not None:
                return self._run(call, tool, decision)
            case Decision.HOLD:
                return Held(call)
            case Decision.NO_SUCH_TOOL:
                return ToolResult(f"There is no tool called {call.name!r}. {self._tools_there_are()}", is_error=True)
            case _:
                about = {"task": self.holder.task_id, "call": call.id, "name": call.name}
                event(log, "outcome-unknown", level=logging.WARNING, **about)
                return ToolResult(STATE_UNKNOWN, is_error=True)

    def _run(self, call: Call, tool: Tool, decision: Decision) -> ToolResult:
        if problem := tool.check(call.input):
            # Nothing can have happened, so nothing is marked or recorded; unless the tool took such input before a
            # deploy, and was cut off.
            may_have_run = decision is Decision.RERUN and tool.effect is not Effect.READ_ONLY
            return ToolResult(STATE_UNKNOWN, is_error=True) if may_have_run else problem
        context = self._context_for(call, tool)
        if tool.effect is not Effect.READ_ONLY:
            self.drain.leave()  # verify may have taken its time
            self.store.mark_started(self.holder, call, tool.effect.value)
            self.markers[call.id] = Marker(self.holder.epoch, tool.effect.value)  # should a cancel end the call
            crash_point("after-start-mark")
            self.holder.check()
        try:
            result = tool.run(call.input, context)
        except Interrupted as stopped:
            result = self._interrupted(call, tool, decision, stopped)
        crash_point("after-effect")
        return self._record(call, result, decision)

    def _interrupted(self, call: Call, tool: Tool, decision: Decision, stopped: Interrupted) -> ToolResult:
        """Raise what the call was interrupted for. It counts as never started, unless an earlier run of it may have
        done something."""
        if tool.interruptible:
            fresh = decision is Decision.RUN
            if fresh:
                self.markers.pop(call.id, None)
            self.holder.watch()
            if self.drain.asked:
                raise Interrupted(f"{self.drain.why}; {stopped}", undone=call if fresh else None) from None
        return ToolResult("The tool stopped although nobody had asked it to.", is_error=True)

    def _record(self, call: Call, result: ToolResult, decision: Decision) -> ToolResult:
        def entry(result: ToolResult) -> Entry:
            return Entry(call.name, digest(call.input), result.content, result.is_error, self.holder.epoch)

        try:
            entry(result).dump(0)
        except Unstorable as error:
            result = ToolResult(f"The call ran; its result cannot be stored: {error}", is_error=True)
        self.store.record_result(self.holder, call, entry(result), decision=decision.value)
        self.recorded += 1
        self.entries[call.id] = entry(result)  # should a cancel come before point B
        crash_point("after-effect-write")
        return result

    def _together(self, calls: Sequence[Call]) -> list[ToolResult | Held]:
        pool = ThreadPoolExecutor(min(PARALLEL_MAX, len(calls)), thread_name_prefix="tool")
        try:
            return [future.result() for future in [pool.submit(self._answer, call) for call in calls]]
        finally:
            # After a timeout, a cancel or a lost lease nobody waits for those that still run: they only read.
            pool.shutdown(wait=False, cancel_futures=True)

    def _let_settle(self) -> bool:
        """A request outlives the process that sent it; the claim came after its death, so it is timed from here."""
        until = self.began + self.settle_s
        if time.monotonic() >= until:
            return False
        while (left := until - time.monotonic()) > 0:
            self.holder.stop.wait(min(left, SETTLE_SLICE_S))
            self.holder.watch()
            self.drain.leave()
        return True

    def _as_it_stands(self, call: Call) -> ToolResult:
        decision = self._decide(call)
        if decision is Decision.REUSE:
            return ToolResult(self.entries[call.id].content, self.entries[call.id].is_error)
        may_have_run = decision in (Decision.RERUN, Decision.VERIFY, Decision.UNKNOWN, Decision.HOLD)
        return ToolResult(STATE_UNKNOWN if may_have_run else NOT_EXECUTED, is_error=True)

    def _decide(self, call: Call) -> Decision:
        return decide(
            call,
            entry=self.entries.get(call.id),
            marker=self.markers.get(call.id),
            markers_trusted=self.markers_trusted,
            nature=None if (tool := self.toolbox.get(call.name)) is None else nature_of(tool),
        )

    def _context_for(self, call: Call, tool: Tool) -> ToolContext:
        return self.context(call, tool, idempotency_key(self.holder.task_id, call))

    def _is_read_only(self, call: Call) -> bool:
        tool = self.toolbox.get(call.name)
        return tool is not None and tool.effect is Effect.READ_ONLY

    def _tools_there_are(self) -> str:
        names = sorted(tool.name for tool in self.toolbox)
        return f"The tools are: {', '.join(names)}." if names else "This task has no tools."


def nature_of(tool: Tool) -> Nature:
    """What reconcile needs to know of a tool."""
    return Nature(tool.effect, tool.verify is not None, tool.on_unknown)


def idempotency_key(task_id: str, call: Call) -> str:
    """The same for every run of this call, over every resume; different for every other call of any task."""
    return hashlib.sha256(f"{task_id}/{call.turn}/{call.id}".encode()).hexdigest()[:32]


def result_block(call: Call, result: ToolResult) -> dict[str, Any]:
    """The tool_result block; `is_error` only where it is true, as the API documents it."""
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": call.id, "content": result.content}
    return {**block, "is_error": True} if result.is_error else block
