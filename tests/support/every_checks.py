"""What holds after every run, whatever struck it, compared with the run in which nothing went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ops.transcript import check_request
from tests.state.faults import Blow, Fault
from tests.state.invariants import check_invariants
from tests.support.agents import T
from tests.support.every_course import Message
from tests.support.every_fleet import QUEUE, Fleet
from tests.support.every_server import Still
from worker.answers import NOT_EXECUTED, STATE_UNKNOWN
from worker.state.checkpoint import Checkpoint
from worker.state.keys import call_field
from worker.state.ledger import Call
from worker.state.store import Store
from worker.state.task import Status, Task
from worker.tools.base import MAY_HAVE_HAPPENED

AGAIN = frozenset({"look", "put"})  # tools that may run again
NEVER = frozenset({"nothing"})  # a tool there is not
TOKENS = 15  # of one answer of the script
ESTIMATE_MAX = 1_500  # of any call in a story


@dataclass(frozen=True)
class Outcome:
    """What is left of a run, read once. `checkpoint` is None for a task that nobody ever began."""

    sent: tuple[Message, ...]
    task: Task
    kinds: Counter[str]
    documents: tuple[bytes, ...]
    checkpoint: Checkpoint | None
    effects: Counter[str]
    requests: int

    @classmethod
    def of(cls, fleet: Fleet) -> Outcome:
        """Raises CheckpointDamaged for a conversation that nobody could go on with."""
        documents = tuple(fleet.documents())
        return cls(
            tuple(fleet.course.sent), fleet.task(), Counter(fleet.kinds()), documents,
            fleet.checkpoint() if documents else None, Counter(fleet.effects), len(fleet.model.log),
        )  # fmt: skip

    @property
    def turns(self) -> int:
        return self.checkpoint.turns if self.checkpoint else 0

    @property
    def kept_all(self) -> bool:
        """Every answer of the model became a message. One that did not is counted, and asked for again."""
        return sum(b'"assistant"' in document for document in self.documents) == self.turns

    def answered(self) -> Iterator[tuple[Call, dict[str, Any]]]:
        """Each call of the conversation with its result."""
        turn, calls = 0, {}
        for message in self.checkpoint.messages if self.checkpoint else ():
            blocks = message["content"] if isinstance(message["content"], list) else []
            if message["role"] == "assistant":
                turn += 1
                calls = {b["id"]: Call(turn, b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"}
            else:
                yield from ((calls[b["tool_use_id"]], b) for b in blocks if b["type"] == "tool_result")


def check(fleet: Fleet, clean: Outcome) -> None:
    """Raises AssertionError with the first guarantee that does not hold."""
    point, before = fleet.point, fleet.point.at - 1
    assert fleet.course.fired, "the mishap never struck"
    assert tuple(fleet.course.sent[:before]) == clean.sent[:before], "not the same messages as without the mishap"
    assert fleet.course.wrong == [], fleet.course.wrong
    now = Outcome.of(fleet)
    _check_end(fleet, now, clean)
    check_calls(fleet, now)
    _check_conversation(fleet, now, clean)
    _check_budget(fleet, now, clean)
    check_invariants(Store(Still(fleet.observer), fleet.store.writes.dispatcher))  # type: ignore[arg-type]
    if isinstance(point.mishap, Fault) and not point.for_s:
        _check_unharmed(now, clean)


def _check_end(fleet: Fleet, now: Outcome, clean: Outcome) -> None:
    """It has ended as it may, once for each time that it was set going, and nothing of it is left to do."""
    task, kinds, keys = now.task, now.kinds, fleet.store.keys
    assert task.status in fleet.story.ends, f"{task.status}: {task.reason}"
    assert task.result == clean.task.result or task.status is not clean.task.status, task.result
    assert kinds["ended"] == 1 + kinds["retried"], kinds
    with fleet.observer.pipeline() as pipe:
        told = pipe.hgetall(keys.counters()).lrange(QUEUE, 0, -1).exists(keys.lock(T)).get(keys.epoch(T)).execute()
    counted, on_list, locked, epoch = told
    assert sum(int(counted.get(s.value.encode(), 0)) for s in Status if s.ended) == kinds["ended"], counted
    assert on_list == [], "a job is left on the list"
    assert not locked, "the lock is left"
    assert epoch in (None, f"{task.attempts * 2}:".encode()), f"epoch {epoch!r} after {task.attempts} attempts"
    assert task.attempts == kinds["claimed"] <= clean.task.attempts + 1 + kinds["resolved"], kinds
    assert task.crashes <= clean.task.crashes + 1, f"{task.crashes} crashes"


def check_calls(fleet: Fleet, now: Outcome) -> None:
    """A result is real or says that it is unknown, and a side effect happened once; or never, if it is unknown."""
    told = set()
    for call, block in now.answered():
        name, line, content = call.name, _line(call), block["content"]
        told.add(line)
        times = now.effects[line]
        assert times <= 1 or name in AGAIN, f"{line} happened {times} times"
        if content == STATE_UNKNOWN:
            assert name not in AGAIN, f"{line} could have been run again"
            if fleet.point.mishap is not Blow.ROLLED_BACK:  # then nobody can tell what never began
                _check_nobody_knows(fleet, call)
        elif content == NOT_EXECUTED or name in NEVER or "line" not in call.input:
            assert block["is_error"], f"{line} did not run, and its result is no error"
            assert times == 0, f"{line} happened, and its result says it did not"
        else:
            assert times >= 1, f"{line} did not happen, and its result says it did"
            assert content.endswith(MAY_HAVE_HAPPENED) if name == "burst" else content == f"did {line}", content
    for call in now.checkpoint.pending if now.checkpoint else ():  # cancelled when its worker had died
        told.add(_line(call))
        assert now.effects[_line(call)] <= 1, f"{_line(call)} happened more than once"
    assert now.effects.keys() <= told, "something happened that the conversation does not tell of"
    assert all(len(keys) == 1 for keys in fleet.world.keys.values()), "one call under two idempotency keys"


def _line(call: Call) -> str:
    """As the world keeps it."""
    return f"{call.name} {call.input.get('line', '')}"


def _check_nobody_knows(fleet: Fleet, call: Call) -> None:
    """It was marked as begun, and never recorded; then alone may a result be unknown."""
    field = call_field(call.turn, call.id)
    assert fleet.observer.hexists(fleet.store.keys.started(T), field), f"{call.id} never began, and is called unknown"
    assert not fleet.observer.hexists(fleet.store.keys.ledger(T), field), f"{call.id} is recorded, and called unknown"


def _check_conversation(fleet: Fleet, now: Outcome, clean: Outcome) -> None:
    """Every request was one that the API accepts and continued the one before; at most one more for a lost attempt."""
    forgot = fleet.point.mishap is Blow.ROLLED_BACK
    if forgot:  # what a request was built on may be forgotten after it was sent
        assert [problem for body in fleet.model.bodies for problem in check_request(body)] == []
    else:
        fleet.check()
    lost = now.task.attempts - clean.task.attempts + forgot
    assert now.requests <= clean.requests + lost, "more than one answer was paid for again"
    assert now.turns <= now.requests, "an answer was counted twice"
    if now.checkpoint is None:
        return
    tokens = now.checkpoint.total_tokens
    assert tokens == TOKENS * now.turns, f"{tokens} tokens in {now.turns} turns"
    assert not now.checkpoint.pending or now.task.status is Status.CANCELLED, "calls are left without a result"
    if forgot:  # a task can end on a server that forgot its last answer
        assert now.turns <= clean.turns, f"{now.turns} turns instead of {clean.turns}"
    elif now.task.status is Status.SUCCEEDED is clean.task.status:
        assert len(now.documents) == len(clean.documents), "messages too many or too few"
        assert now.turns == clean.turns or not clean.kept_all, f"{now.turns} turns instead of {clean.turns}"


def _check_budget(fleet: Fleet, now: Outcome, clean: Outcome) -> None:
    """Each answer is charged once, and at most one call more for each attempt that was lost, at its estimate."""
    for one in fleet.store.list_budgets():
        charged = one.used - TOKENS * now.turns
        lost = now.task.attempts - clean.task.attempts + (fleet.point.mishap is Blow.ROLLED_BACK)
        assert one.reserved == 0, f"{one.reserved} tokens are still reserved"
        assert 0 <= charged <= lost * ESTIMATE_MAX, f"{charged} tokens charged for {lost} lost attempts"
        assert charged == 0 or charged > TOKENS, f"{charged} tokens charged, which is no estimate"


def _check_unharmed(now: Outcome, clean: Outcome) -> None:
    """Nobody died and Redis was soon well again: all is as if nothing had been."""
    assert now.task.attempts == clean.task.attempts, f"{now.task.attempts} attempts, although nobody died"
    assert (now.task.crashes, now.task.reason) == (clean.task.crashes, clean.task.reason)
    assert now.documents == clean.documents, "another conversation"
    assert now.effects == clean.effects, "other things happened"
    assert now.requests == clean.requests, "an answer was paid for again"
