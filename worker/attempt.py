"""One ownership of a task, from claim to finish, park, hand-over or loss: the verb that belongs to each outcome."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker import drain
from worker.agent import Agent, Ending
from worker.answers import Answers, Held
from worker.crashpoints import crash_point
from worker.dispatch import JOB_TIMEOUTS
from worker.errors import (
    BatonError,
    CancelRequested,
    CheckpointTooNew,
    DrainRequested,
    Interrupted,
    InvalidInput,
    LeaseLost,
    ModelConfig,
    ModelFault,
    ModelPermanent,
    ModelTransient,
    MustWait,
    RedisUnavailable,
    StorageRefused,
    TaskFailed,
    TaskFault,
)
from worker.estimate import Estimate
from worker.log import event
from worker.request import build_request
from worker.state.checkpoint import Checkpoint
from worker.state.lease import Holder
from worker.state.ledger import Call
from worker.state.load import Loaded, load
from worker.state.store import Store
from worker.state.task import ParkNote, Status
from worker.stuck import Bounds
from worker.throttle import gate_for
from worker.tools import Tool, Toolbox, ToolContext, ToolDefinitionError

if TYPE_CHECKING:
    from worker.runtime import Runtime

log = logging.getLogger(__name__)

TRANSIENT_PARK_S = 5.0
CONFIG_PARK_S = 30.0
TOO_NEW_PARK_S = 60.0


@dataclass(frozen=True)
class Pause:
    """Why a task has to wait, and for how long at first (None: for a person). `doubles`: the wait does, and varies,
    while the task does not get on."""

    reason: str
    first_wait_s: float | None
    at_least_s: float = 0.0
    spends_attempt: bool = True
    doubles: bool = True
    waits_for: str = ""
    ticket: str = ""


@dataclass(frozen=True)
class TimedOut:
    """Somebody gave the RQ job a timeout. Going on is fine if the attempt got anywhere, else it counts as a crash."""

    why: str


@dataclass(frozen=True)
class Drained:
    """This process is to end, so another one goes on."""

    why: str
    abandoned: bool = False
    undone: Call | None = None


class Attempt:
    """One ownership, from claim to finish, park, hand-over or loss."""

    def __init__(self, runtime: Runtime, store: Store, holder: Holder) -> None:
        self.runtime = runtime
        self.settings = runtime.settings
        self.store = store
        self.holder = holder
        self.loaded: Loaded | None = None
        self.agent: Agent | None = None
        self.begun: Checkpoint | None = None  # where the agent went on from

    def run(self) -> str:
        try:
            return self._let_go(self._outcome())
        except LeaseLost as lost:
            event(log, "stopped", level=logging.WARNING, task=self.holder.task_id, why=lost)
            return f"lease lost: {lost}"
        except (RedisUnavailable, StorageRefused) as error:
            # Nothing can be written; the lease runs out by itself and a sweeper hands the task on.
            event(log, "gave-up", level=logging.ERROR, task=self.holder.task_id, why=error)
            raise
        except TaskFailed:
            raise
        except Exception as error:
            event(log, "worker-error", level=logging.ERROR, task=self.holder.task_id, why=repr(error))
            self._give_back(f"error in the worker: {type(error).__name__}")
            raise

    def _outcome(self) -> Ending | Held | Pause | TimedOut | Drained:
        """Run the agent; what went wrong with the task or the model becomes an outcome too."""
        try:
            self.loaded = load(self.store.client, self.store.keys, self.store.probe, self.holder)
            self.agent = self._agent(self.loaded)
            self.begun = self.agent.now
            return self.agent.run()
        except CancelRequested as asked:
            return Ending(Status.CANCELLED, str(asked))
        except DrainRequested as asked:
            return Drained(str(asked), asked.abandoned)
        except Interrupted as stopped:
            return Drained(str(stopped), undone=stopped.undone)
        except MustWait as wait:
            return Pause(str(wait), wait.wait_s, doubles=False, spends_attempt=False, waits_for=wait.waits_for,
                         ticket=wait.ticket)  # fmt: skip
        except CheckpointTooNew as error:
            return Pause(str(error), TOO_NEW_PARK_S, spends_attempt=False)
        except ModelTransient as error:
            reason = f"the model cannot be reached just now: {_named(error)}"
            return Pause(reason, TRANSIENT_PARK_S, error.retry_after_s or 0.0)
        except (ModelConfig, ToolDefinitionError) as error:
            event(log, "needs-a-person", level=logging.ERROR, task=self.holder.task_id, why=error)
            return Pause(f"needs a person: {_named(error)}", CONFIG_PARK_S)
        except TaskFault as error:
            return Ending(Status.FAILED, f"damaged: {error}", error=str(error))
        except (ModelPermanent, InvalidInput) as error:
            return Ending(Status.FAILED, _named(error), error=_named(error))
        except JOB_TIMEOUTS as error:
            return TimedOut(str(error))

    def _agent(self, loaded: Loaded) -> Agent:
        toolbox = self.runtime.make_toolbox(self.settings)
        request, now, task = loaded.request, loaded.checkpoint, loaded.task
        if request is None or now is None:
            tools = toolbox.definitions(task.tools)
            request = build_request(self.settings, model=task.model or None, system=task.system or None, tools=tools)
            first = {"role": "user", "content": task.text}
            needs = Estimate(request).next_call([first]) if self.holder.scopes else 0
            self.store.begin(self.holder, request, first, needs=needs)
            now = Checkpoint(messages=[first])
        else:
            pending = ",".join(call.name for call in now.pending) or "nothing"
            if not loaded.history_whole:
                why = "Redis was restarted or replaced, and may have forgotten what it had acknowledged"
                event(log, "history-may-be-lost", level=logging.WARNING, task=task.task_id, why=why)
            event(log, "resumed", task=task.task_id, turn=now.turns, pending=pending, trusted=loaded.markers_trusted)
        # What a later deploy brings was never offered to this conversation, so it cannot be called in it.
        offered = {tool["name"] for tool in request.get("tools", [])}
        toolbox = Toolbox(tool for tool in toolbox if tool.name in offered)
        calls = loaded.calls
        answers = Answers(
            self.store, self.holder, toolbox, self._context, calls.entries, calls.markers, loaded.markers_trusted,
            resolutions=calls.resolutions, resumed=bool(now.pending), settle_s=self.settings.verify_settle_s,
            drain=drain.PROCESS,
        )  # fmt: skip
        model = self.runtime.make_model(self.settings)
        gate = gate_for(self.store, self.settings, model, request, task.parked)
        return Agent(
            self.store, self.holder, task, request, now, model, answers, drain.PROCESS, gate,
            loaded.deadline_at, Estimate(request), Bounds.of(self.settings),
        )  # fmt: skip

    def _context(self, call: Call, tool: Tool, key: str) -> ToolContext:
        return ToolContext(
            task_id=self.holder.task_id,
            call_id=call.id,
            tool=tool.name,
            turn=call.turn,
            attempt=self.holder.attempt,
            epoch=self.holder.epoch,
            idempotency_key=key,
            workspace=self.settings.workspace,
            result_max_bytes=self.settings.result_max_bytes,
            settings=self.settings,
            control_flow=JOB_TIMEOUTS,
            should_stop=self.holder.stopping,
            deadline=self.loaded.deadline_at if self.loaded else None,
            draining=lambda: drain.PROCESS.asked,
            interruptible=tool.interruptible,
        )

    # -- letting go --------------------------------------------------------------------------------------------

    def _let_go(self, outcome: Ending | Held | Pause | TimedOut | Drained) -> str:
        """The verb that belongs to the outcome. A cancel that came at the last moment comes first."""
        try:
            match outcome:
                case Ending():
                    crash_point("before-finish")
                    return self._finish(outcome)
                case Pause():
                    return self._park(outcome)
                case Held(call):
                    what = f"nobody knows whether {call.name} (call {call.id}) took effect before a crash"
                    self.store.park(self.holder, f"needs a person: {what}", wait_ms=None)
                    return f"parked: {what}"
                case Drained(why, abandoned, undone):
                    self.store.hand_over(self.holder, why, abandoned=abandoned, undone=undone)
                    event(log, "handed-over", task=self.holder.task_id, why=why, abandoned=abandoned)
                    return f"handed over: {why}"
                case TimedOut(why) if self._got_on():
                    self.store.hand_over(self.holder, f"RQ's job timeout: {why}")
                    return "handed over at RQ's job timeout"
                case TimedOut():
                    return self._give_back("RQ's job timeout")
        except CancelRequested as asked:
            if self.agent is not None and isinstance(outcome, Drained | TimedOut):
                self.agent.leave_valid()
            return self._finish(Ending(Status.CANCELLED, str(asked)))

    def _finish(self, ending: Ending) -> str:
        self.store.finish(self.holder, ending.status, reason=ending.reason, result=ending.result, error=ending.error)
        event(log, "finished", task=self.holder.task_id, status=ending.status, reason=ending.reason)
        if ending.status is Status.FAILED:
            raise TaskFailed(f"task {self.holder.task_id} failed: {ending.reason}")
        return ending.status.value

    def _park(self, pause: Pause) -> str:
        turns = self.agent.now.turns if self.agent else self._turns_before()
        before = self.loaded.task.parked if self.loaded else ParkNote()
        streak = before.streak + 1 if before.turns == turns else 1
        wait_s = pause.first_wait_s
        if wait_s is not None and pause.doubles:
            wait_s = min(wait_s * 2 ** min(streak - 1, 20), self.settings.park_max_s)
            wait_s = max(wait_s * random.uniform(0.8, 1.2), pause.at_least_s)
        note = ParkNote(streak, turns, pause.spends_attempt, pause.waits_for, pause.ticket)
        wait_ms = None if wait_s is None else int(wait_s * 1000)
        self.store.park(self.holder, pause.reason, wait_ms=wait_ms, note=note)
        event(log, "parked", task=self.holder.task_id, seconds=wait_s and round(wait_s, 1), why=pause.reason)
        return f"parked: {pause.reason}"

    def _turns_before(self) -> int:
        return self.loaded.checkpoint.turns if self.loaded and self.loaded.checkpoint else 0

    def _got_on(self) -> bool:
        """Something is stored that the next attempt need not do again. A start marker is not: a call that takes
        longer than RQ's timeout would be begun for ever."""
        return self.agent is not None and (self.agent.now is not self.begun or self.agent.answers.recorded > 0)

    def _give_back(self, why: str) -> str:
        """This attempt failed as a crash would, and is counted as one."""
        self.store.recover(self.holder.task_id, proof=why, fence=self.holder.fence)
        return f"given back: {why}"


def _named(error: BatonError) -> str:
    """What went wrong, with the API's name for the request, by which its owner can look it up."""
    request_id = error.request_id if isinstance(error, ModelFault) else None
    return str(error) if not request_id or request_id in str(error) else f"{error} (request {request_id})"
