"""The harness of `test_every_command.py` can fail: each protection is taken away, and it says what came of it.

Every test has two runs of the same few points: with the protection nothing is wrong, without it something is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.state.faults import Blow, Fault
from tests.support.every_course import Message, Point
from tests.support.every_run import Stage, told
from tests.support.every_stories import STORIES
from worker.answers import Answers
from worker.reconcile import Decision
from worker.state import transact
from worker.state.guards import Guards
from worker.state.lease import Holder
from worker.state.ledger import Call
from worker.state.store import Store
from worker.tools import Tool, ToolResult

pytestmark = [pytest.mark.server, pytest.mark.no_cover]
Patch = pytest.MonkeyPatch


@pytest.fixture
def stage(redis_client: redis.Redis, redis_url: str) -> Iterator[Stage]:
    with Stage(redis_url, redis_client) as made:
        yield made
    redis_client.flushdb()


# -- taking protections away ---------------------------------------------------------------------------------------


def no_start_marker(patch: Patch) -> None:
    patch.setattr(Store, "mark_started", lambda *_: None)


def ledger_before_the_effect(patch: Patch) -> None:
    def run(self: Answers, call: Call, tool: Tool, decision: Decision) -> ToolResult:
        self.store.mark_started(self.holder, call, tool.effect.value)
        result = self._record(call, ToolResult(f"did {call.name} {call.input['line']}"), decision)
        tool.run(call.input, self._context_for(call, tool))
        return result

    patch.setattr(Answers, "_run", run)


def no_fence(patch: Patch) -> None:
    patch.setattr(Guards, "_require_fence", lambda *_: None)


def lie(patch: Patch, about: Callable[[Any, bytes, bytes], list[Any]]) -> None:
    """What a commit reads as (seq, commit) is what `about` makes of the holder and both."""
    real = Guards._transact_as

    def lying(self: Guards, holder: Any, watch: Any, reads: Any, decide: Any) -> None:
        def with_lies(replies: list[Any]) -> Any:
            if isinstance(replies[1], list):  # a release reads other things
                replies[1] = about(holder, *replies[1])
            return decide(replies)

        real(self, holder, watch, reads, with_lies)

    patch.setattr(Guards, "_transact_as", lying)


def no_stamp(patch: Patch) -> None:
    lie(patch, lambda holder, seq, commit: [seq, None])


def no_seq(patch: Patch) -> None:
    lie(patch, lambda holder, seq, commit: [str(holder.seq).encode() if holder.seq else seq, commit])


def create_in_two_steps(patch: Patch) -> None:
    real = Store.create

    def create(self: Store, new: Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(self.writes.dispatcher, "push", lambda *_, **__: None)
            created = real(self, new)
        with self.client.pipeline() as pipe:
            if not created.existed:
                self.writes.dispatcher.push(pipe, new.task_id, 1, new.queue)
                pipe.execute()
        return created

    patch.setattr(Store, "create", create)


def retries_left_on(patch: Patch) -> None:
    patch.setattr(transact, "connect", lambda url: redis.Redis.from_url(url, retry=Retry(NoBackoff(), 3)))


def no_bound_of_its_own(patch: Patch) -> None:
    patch.setattr(Holder, "_in_doubt", lambda self: False)


def a_persons_word_kept(patch: Patch) -> None:
    real = Store.mark_started

    def mark_started(self: Store, holder: Holder, *about: Any) -> None:
        control: Any = self.keys.control(holder.task_id)
        said: Any = self.client.hgetall(control)
        real(self, holder, *about)
        if said:
            self.client.hset(control, mapping=said)

    patch.setattr(Store, "mark_started", mark_started)


# -- and seeing what comes of it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sabotage:
    """`point` is tried at each message that `where` picks. `says`: what one of the failures must tell of."""

    take_away: Callable[[Patch], None]
    point: Point
    where: Callable[[Message], bool]
    says: str
    story: str = "a side effect"


def by_worker(word: str) -> Callable[[Message], bool]:
    return lambda message: message.who == "worker" and word in message.commands


def by_person(message: Message) -> bool:
    return message.who == "person"


KILLED = Point(Blow.KILLED_BEFORE)
KILLED_AFTER = Point(Blow.KILLED_AFTER)
TAKEN = Point(Blow.FROZEN_BEFORE, ended=False)
ASLEEP = Point(Blow.FROZEN_AFTER, ended=False)

SABOTAGES = [
    Sabotage(no_start_marker, KILLED, by_worker("WATCH"), "send a happened 2 times"),
    Sabotage(ledger_before_the_effect, KILLED_AFTER, by_worker("EXEC"), "and its result says it did"),
    Sabotage(no_fence, TAKEN, by_worker("WATCH"), "woke up too late"),
    Sabotage(no_fence, TAKEN, lambda m: m.who == "heartbeat" and "WATCH" in m.commands, "woke up too late"),
    Sabotage(no_stamp, Point(Fault.LOST), by_worker("EXEC"), "2 attempts"),
    Sabotage(no_seq, Point(Blow.ROLLED_BACK), by_worker("WATCH"), "messageCount says"),
    Sabotage(create_in_two_steps, KILLED_AFTER, by_person, "on no list"),
    Sabotage(retries_left_on, Point(Fault.LOST), by_worker("HGETALL"), "sent again behind the back"),
    Sabotage(no_bound_of_its_own, ASLEEP, by_worker("EXEC"), "at the hand of one that woke up too late"),
    Sabotage(a_persons_word_kept, KILLED_AFTER, by_worker("EXEC"), "wire a happened 2 times", "held and resolved"),
]


@pytest.mark.parametrize("sabotaged", [False, True], ids=["protected", "sabotaged"])
@pytest.mark.parametrize("case", SABOTAGES, ids=lambda case: f"{case.take_away.__name__}-{case.says.replace(' ', '-')}")
def test_without_the_protection_the_harness_says_what_is_broken(
    stage: Stage, monkeypatch: Patch, case: Sabotage, sabotaged: bool
) -> None:
    if sabotaged:
        case.take_away(monkeypatch)
    story = next(story for story in STORIES if story.name == case.story)
    clean = stage.clean(story)
    last, chosen = 0, []
    for at, message in enumerate(clean.sent, 1):
        if case.where(message) and (last or case.point.mishap is not Blow.ROLLED_BACK):
            chosen.append(replace(case.point, at=at, back_to=last))
        if by_worker("EXEC")(message):
            last = at
    problems = stage.problems(story, clean, chosen)
    if sabotaged:
        assert any(case.says in problem for problem in problems), f"{len(chosen)} points{told(problems)}"
    else:
        assert not problems, told(problems)
