"""The loop: ask the model, save (point A), answer its calls, save (point B), until there is nothing left to ask.

A resumed task enters here exactly like a new one: whatever is pending is answered first.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from worker.answers import Answers, Held
from worker.crashpoints import crash_point
from worker.drain import Drain
from worker.errors import CancelRequested, DeadlinePassed, ModelFault, ModelPermanent
from worker.estimate import Estimate
from worker.log import event
from worker.state.checkpoint import Checkpoint, Message, find_unsound, tool_calls
from worker.state.codec import Unstorable, encode
from worker.state.lease import Holder
from worker.state.store import Store
from worker.state.task import Status, Task, too_late
from worker.stuck import Bounds, look_back
from worker.throttle import Gate
from worker.tools.output import clean
from worker.tools.plain import Unprintable

if TYPE_CHECKING:  # importing it costs a second: anthropic
    from worker.model import Model, Response

log = logging.getLogger(__name__)

FINISHED = frozenset({"end_turn", "stop_sequence"})
RUNS_TOOLS = frozenset({"tool_use", "pause_turn"})  # a pause may hold our calls too; then they must be answered

# Ends that are no answer. The response is counted and not kept: a cut-off call in it must never run.
REFUSED_ENDS = {
    "max_tokens": "truncated: the answer was longer than max_tokens (BATON_MAX_TOKENS)",
    "model_context_window_exceeded": "truncated: the conversation no longer fits the model's context window",
    "refusal": "refused: the model declined to answer",
}


@dataclass(frozen=True)
class Ending:
    """The task is over."""

    status: Status
    reason: str
    result: str = ""
    error: str = ""


@dataclass
class Agent:
    """One attempt at one task, by its holder. `now` is the checkpoint as last saved."""

    store: Store
    holder: Holder
    task: Task
    request: dict[str, Any]
    now: Checkpoint
    model: Model
    answers: Answers
    drain: Drain = field(default_factory=Drain)
    gate: Gate = field(default_factory=Gate)
    deadline_at: float | None = None  # by the holder's clock
    estimate: Estimate = field(default_factory=Estimate)
    bounds: Bounds = field(default_factory=Bounds)

    def run(self) -> Ending | Held:
        """Until the task is over or has to wait for a person. StopRunning and ModelFault pass through."""
        while True:
            if self.now.pending:
                if held := self.answer_calls():
                    return held
            elif self.now.stop_reason in FINISHED:
                return Ending(Status.SUCCEEDED, self.now.stop_reason, result=last_text(self.now.messages))
            if limit := self.limit_reached():
                return limit
            self.drain.leave()
            look_back(self.store, self.holder, self.now, self.task.parked, self.bounds)
            self.afford()
            try:
                response = self.gate.through(self.ask)
            except DeadlinePassed as passed:
                return _limit(str(passed))
            crash_point("after-model-response")
            if ending := self.take(response):
                return ending

    def afford(self) -> None:
        """Have the next call's tokens reserved, if a budget applies and it was not done along with the last commit."""
        if not self.holder.covered:
            self.store.reserve(self.holder, self.estimate.next_call(self.now.messages), self.now.turns)

    def ask(self) -> Response:
        self.holder.calling = True
        try:
            return self.model.respond(self.request, self.now.messages, watch=self.watch_call)
        except ModelFault:  # no answer, so there is nothing to pay; whoever abandons a call may have to
            self.holder.calling = False
            raise

    def watch_call(self) -> None:
        """Looked at all through a model call: a reason to abandon it?"""
        self.holder.watch()
        self.drain.leave(abandoning=True)
        if self._too_late():
            raise DeadlinePassed(too_late(self.task.deadline_ms or 0))

    def take(self, response: Response) -> Ending | None:
        """Point A: count the response, and keep it if the conversation can go on from it."""
        message, stop = _message(response), clean(response.stop_reason)
        made = tool_calls(message, self.now.turns + 1)
        pending = made if stop in RUNS_TOOLS else ()
        # Calls that will not be answered must not stay in the history, and an empty message may not.
        goes_on = stop in FINISHED | RUNS_TOOLS and len(made) == len(pending)
        kept = goes_on and bool(message["content"])
        said = text_of(message)
        after = Checkpoint(
            turns=self.now.turns + 1,
            tokens_used=_added(self.now.tokens_used, response.usage),
            total_tokens=self.now.total_tokens + response.total_tokens,
            messages=[*self.now.messages, message] if kept else self.now.messages,
            pending=pending,
            stop_reason=stop if goes_on else "",  # there is nothing to end with: whoever goes on from here asks again
        )
        self.store.save_response(
            self.holder, message if kept else None, after,
            stopReason=stop, tokens=response.total_tokens, tries=response.tries,
            text=said[:2_000], calls=[call.name for call in pending],
        )  # fmt: skip
        self.now = after
        self.estimate.learn(response.total_tokens, len(after.messages))
        crash_point("after-save-a")
        event(log, "responded", task=self.task.task_id, turn=after.turns, stop=stop, calls=len(pending))
        if goes_on:
            return None
        why = _why_not(stop)
        return Ending(Status.FAILED, why, result=said, error=f"{why} (request {response.request_id})")

    def answer_calls(self) -> Held | None:
        """Point B: every pending call gets its result, in one user message, in the order of the calls."""
        cancelled: CancelRequested | None = None
        try:
            blocks = self.answers.to(self.now.pending)
        except CancelRequested as asked:  # leave a history behind that is valid, then go
            cancelled, blocks = asked, self.answers.without_running(self.now.pending)
        if isinstance(blocks, Held):
            return blocks
        self._save_results(blocks)
        if cancelled:
            raise cancelled
        return None

    def leave_valid(self) -> None:
        """For a task that is cancelled while it is let go of: what can be said of pending calls without running any."""
        if self.now.pending:
            self._save_results(self.answers.without_running(self.now.pending))

    def _save_results(self, blocks: list[dict[str, Any]]) -> None:
        message: Message = {"role": "user", "content": blocks}
        after = Checkpoint(
            turns=self.now.turns,
            tokens_used=self.now.tokens_used,
            total_tokens=self.now.total_tokens,
            messages=[*self.now.messages, message],
            stop_reason=self.now.stop_reason,
            server_run_id=self.now.server_run_id,
        )
        needs = self.estimate.next_call(after.messages) if self.holder.scopes else 0
        self.store.save_results(self.holder, message, after, needs=needs, decisions=self.answers.decided)
        self.now = after
        crash_point("after-save-b")

    def limit_reached(self) -> Ending | None:
        if self.now.turns >= self.task.turns_max:
            return _limit(f"{self.now.turns} turns used, the task allows {self.task.turns_max} (--max-turns)")
        if self.task.tokens_max is not None and self.now.total_tokens >= self.task.tokens_max:
            used, allowed = self.now.total_tokens, self.task.tokens_max
            return _limit(f"{used} tokens used, the task allows {allowed} (--max-tokens-total)")
        if self._too_late():
            return _limit(too_late(self.task.deadline_ms or 0))
        return None

    def _too_late(self) -> bool:
        return self.deadline_at is not None and self.holder.clock.monotonic() >= self.deadline_at


def last_text(messages: list[Message]) -> str:
    """The text of the last message, if it is the assistant's."""
    return text_of(messages[-1]) if messages[-1]["role"] == "assistant" else ""


def text_of(message: Message) -> str:
    """The text blocks of an assistant's message, put together."""
    blocks = message["content"]
    return "".join(block["text"] for block in blocks if block.get("type") == "text" and block.get("text"))


def _message(response: Response) -> Message:
    """The response as it is stored and sent back; raises ModelPermanent if it cannot be stored."""
    try:
        # The API answers with blank text now and then, and refuses every request that holds some.
        content = [block for block in clean(response.content) if not _is_blank(block)]
        encode({"content": content})
    except (Unprintable, Unstorable) as error:
        why = f"the model's answer cannot be stored: {error}"
        raise ModelPermanent(why, request_id=response.request_id) from None
    message = {"role": "assistant", "content": content}
    if problem := find_unsound(message):
        raise ModelPermanent(f"the model's answer is malformed: {problem}", request_id=response.request_id)
    return message


def _is_blank(block: dict[str, Any]) -> bool:
    text = block.get("text")
    return block.get("type") == "text" and isinstance(text, str) and not text.strip()


def _why_not(stop: str) -> str:
    """Why a response that stopped so is no answer."""
    if stop in FINISHED:
        return f"stopped: the model called a tool and ended all the same ({stop})"
    return REFUSED_ENDS.get(stop, f"stopped: unknown stop_reason {stop!r}")


def _limit(what: str) -> Ending:
    return Ending(Status.FAILED, f"limit: {what}", error=what)


def _added(total: dict[str, int], usage: dict[str, int]) -> dict[str, int]:
    return {name: total.get(name, 0) + usage.get(name, 0) for name in [*total, *(n for n in usage if n not in total)]}
