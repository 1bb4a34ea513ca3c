"""The protocol's actors over a real store: runners that stop between any two steps, and a world outside Redis.

A runner is a generator: it takes the steps of `worker.agent` and `worker.answers` in their order, with the real
decisions, and yields between them. Whoever holds it may let it go on, leave it frozen, or end it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.state.kit import T, after_response, said, use
from worker.answers import STATE_UNKNOWN
from worker.errors import CancelRequested
from worker.reconcile import Decision, Nature, after_asking, decide
from worker.state.checkpoint import Checkpoint, Message
from worker.state.codec import digest
from worker.state.lease import Holder
from worker.state.ledger import Call, Entry
from worker.state.load import Calls, load
from worker.state.store import Store
from worker.state.task import Status
from worker.tools import Effect

NATURES = {
    "look": Nature(Effect.READ_ONLY),
    "put": Nature(Effect.IDEMPOTENT),
    "send": Nature(Effect.SIDE_EFFECT),
    "post": Nature(Effect.SIDE_EFFECT, can_verify=True),
    "wire": Nature(Effect.SIDE_EFFECT, on_unknown="hold"),
}
# What the model asks for, turn by turn; then it ends.
TURNS = (("send",), ("look", "put", "post"), ("wire", "send"))
FIRST = {"role": "user", "content": "x"}


@dataclass
class World:
    """What happened, whatever Redis says of it. Calls are named `turn:id`."""

    effects: Counter[str] = field(default_factory=Counter)
    may_still: Counter[str] = field(
        default_factory=Counter
    )  # runners that live and have not come to the call they marked
    asked: int = 0

    def side_effects(self) -> dict[str, int]:
        return {call: times for call, times in self.effects.items() if NATURES[tool_of(call)].effect == "side_effect"}


def name_of(call: Call) -> str:
    return f"{call.turn}:{call.id}"


def tool_of(call: str) -> str:
    return call.rpartition("_")[2]


@dataclass
class Runner:
    """One attempt. `dead`: its process is gone, and everybody may be told so."""

    store: Store
    world: World
    holder: Holder
    dead: bool = False
    done: bool = False
    about_to: str = ""  # the call it has marked, and not come to yet

    def __post_init__(self) -> None:
        self.life = self._life()

    def go_on(self) -> None:
        """One step. Raises LeaseLost."""
        try:
            next(self.life)
        except StopIteration:
            self.done = True
        except CancelRequested as asked:
            self.done = True
            self.store.finish(self.holder, Status.CANCELLED, reason=str(asked))
        except BaseException:
            self.done = True
            raise

    def die(self) -> None:
        self.dead = self.done = True
        self.life.close()

    def _life(self) -> Iterator[None]:
        loaded = load(self.store.client, self.store.keys, self.store.probe, self.holder)
        yield
        calls, trusted, now = loaded.calls, loaded.markers_trusted, loaded.checkpoint
        if now is None:
            self.store.begin(self.holder, {"model": "m"}, FIRST)
            now = Checkpoint(messages=[FIRST])
            yield
        while True:
            if not now.pending:
                if now.turns == len(TURNS):
                    self.store.finish(self.holder, Status.SUCCEEDED, reason="end")
                    return
                self.world.asked += 1
                yield  # the model takes its time
                after = after_response(
                    now, *(use(f"{now.turns}{n}_{tool}", tool) for n, tool in enumerate(TURNS[now.turns]))
                )
                self.store.save_response(self.holder, said(*after.messages[-1]["content"]), after)
                now, calls, trusted = after, Calls(), True
                yield
            blocks: list[dict[str, Any]] = []
            for call in now.pending:
                result = yield from self._answer(call, calls, trusted)
                if result is None:
                    return
                blocks.append({"type": "tool_result", "tool_use_id": call.id, **result})
            now = self._answered(now, {"role": "user", "content": blocks})
            yield

    def _answered(self, now: Checkpoint, message: Message) -> Checkpoint:
        after = replace(now, messages=[*now.messages, message], pending=[])
        self.store.save_results(self.holder, message, after)
        return after

    def _answer(self, call: Call, calls: Calls, trusted: bool) -> Generator[None, None, dict[str, Any] | None]:
        """The result of a call, or None if the task was parked for a person. As `Answers._answer`."""
        self.holder.watch()
        nature, entry, marker = NATURES[call.name], calls.entries.get(call.id), calls.markers.get(call.id)
        decision = decide(call, entry=entry, marker=marker, markers_trusted=trusted, nature=nature)
        if (word := calls.resolutions.get(call.id)) and decision not in (Decision.REUSE, Decision.RUN):
            if word.outcome == "happened":
                yield from self._record(call)
                return {"content": f"did {name_of(call)}"}
            decision = Decision.RUN if word.outcome == "not_happened" else Decision.UNKNOWN
        elif decision is Decision.VERIFY:
            yield
            outcome = "happened" if self.world.effects[name_of(call)] else "not_happened"
            decision = after_asking(outcome, marker, nature)
            if decision is Decision.VERIFY:
                yield from self._record(call)
                return {"content": f"did {name_of(call)}"}
        if decision is Decision.REUSE and entry is not None:
            return {"content": entry.content}
        if decision in (Decision.RUN, Decision.RERUN):
            yield from self._run(call, nature)
            return {"content": f"did {name_of(call)}"}
        if decision is Decision.HOLD:
            self.store.park(self.holder, "needs a person", wait_ms=None)
            return None
        return {"content": STATE_UNKNOWN, "is_error": True}

    def _run(self, call: Call, nature: Nature) -> Iterator[None]:
        if nature.effect is not Effect.READ_ONLY:
            self.store.mark_started(self.holder, call, nature.effect.value)
            self.about_to = name_of(call)
            yield
        self.holder.check()
        yield  # frozen between its last look and the call
        self.world.effects[name_of(call)] += 1
        self.about_to = ""
        yield
        yield from self._record(call)

    def _record(self, call: Call) -> Iterator[None]:
        entry = Entry(call.name, digest(call.input), f"did {name_of(call)}", False, self.holder.epoch)
        self.store.record_result(self.holder, call, entry)
        yield


__all__ = ["TURNS", "Runner", "T", "World", "name_of", "tool_of"]
