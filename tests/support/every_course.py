"""The messages of a run, numbered over all its processes, and the one mishap that strikes there.

A process is played: an attempt at a task, a person's command, a sweeper. Each has connections of its own, and once it
is dead it sends nothing more. One thread plays them all, so that the k-th message is the same one in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import redis

from tests.state.faults import WRITES, Blow, Fault, Mishap, Plan, spoilt
from tests.support.agents import Died, Line
from worker.clock import Clock
from worker.state import transact


class Proof(StrEnum):
    """By what others find out that a process is no more."""

    GONE = "proven gone"
    CUT_OFF = "its connection is gone"
    LAPSED = "its lease runs out"


@dataclass(frozen=True)
class Point:
    """What happens, and at which message. `for_s`: how long it goes on from there; 0: that message alone.
    `back_to`: the message before which the server stands again, having forgotten what came after. `ended`: who is
    frozen wakes up after others have brought the task to its end; else as soon as it was taken away."""

    mishap: Mishap | None = None
    at: int = 0
    for_s: float = 0
    back_to: int = 0
    proof: Proof = Proof.GONE
    ended: bool = True

    def __str__(self) -> str:
        if self.mishap is None:
            return "nothing"
        how = f" for {self.for_s:.0f} s" if self.for_s else ""
        if self.mishap in (Blow.FROZEN_BEFORE, Blow.FROZEN_AFTER):
            how = ", until others are done" if self.ended else ", until it is taken away"
        elif isinstance(self.mishap, Blow) or self.for_s:
            how += f", {self.proof}"
        return f"{self.mishap}{how}"


@dataclass(frozen=True)
class Message:
    """`who` sent it: "worker", "heartbeat", "sweeper", a person; `commands` in it, first words only."""

    who: str
    commands: tuple[str, ...]

    @property
    def changes(self) -> bool:
        return any(word in WRITES for word in self.commands)

    def __str__(self) -> str:
        return f"{self.who}: {' '.join(dict.fromkeys(self.commands))}"


class Process(Line):
    """One played process. `broken`: it is dead."""

    def __init__(self, course: Course, who: str, pid: int) -> None:
        super().__init__()
        self.course = course
        self.who = who
        self.pid = pid
        self.clients: list[redis.Redis] = []

    def client(self, server: Any) -> redis.Redis:
        """Made as the product makes it: its settings are part of what is tested."""
        plan = Link(self, self.who if not self.clients or self.who != "worker" else "heartbeat")
        self.clients.append(spoilt(transact.connect(server), plan))
        return self.clients[-1]

    def die(self) -> None:
        self.broken = Died()
        raise self.broken

    def close(self) -> None:
        """The kernel closes the sockets of a process that is gone."""
        for client in self.clients:
            client.close()


class Course:
    """Everything that is sent in one run, and its mishap. What the mishap does beside breaking a connection is the
    run's: `freeze` plays what others do while a process sleeps, `keep` and `restore` are the server's memory."""

    def __init__(self, point: Point, clock: Clock) -> None:
        self.point = point
        self.clock = clock
        self.sent: list[Message] = []
        self.fired = 0
        self.wrong: list[str] = []
        self.freeze: Callable[[Process], None]
        self.keep: Callable[[], None]
        self.restore: Callable[[], None]
        self.look: Callable[[], None] = lambda: None
        self._until: float | None = None

    def next(self, message: Message) -> Mishap | None:
        self.look()
        self.sent.append(message)
        point, number = self.point, len(self.sent)
        if number == point.back_to:
            self.keep()
        if point.mishap is None or not self._strikes(number) or not point.mishap.concerns(message.commands):
            return None
        self.fired += 1
        return point.mishap

    def _strikes(self, number: int) -> bool:
        now = self.clock.monotonic()
        if number == self.point.at:
            self._until = now + self.point.for_s
        return number == self.point.at or (self._until is not None and now < self._until)


class Link(Plan):
    """One client's part in the course."""

    def __init__(self, process: Process, who: str) -> None:
        super().__init__()
        self.process = process
        self.course = process.course
        self.who = who
        self._cut_at: float | None = None

    def next(self, words: list[str]) -> Mishap | None:
        if self.process.broken is not None:
            if words == ["UNWATCH"]:  # redis-py tidies up, also long after; it would cry out at anything else
                raise redis.ConnectionError("its process is dead")
            raise self.process.broken
        message = Message(self.who, tuple(words))
        self._require_pause(message)
        mishap = self.course.next(message)
        match mishap:
            case Fault.UNSENT | Fault.LOST if words != ["UNWATCH"]:  # redis-py keeps that one to itself, rightly
                self._cut_at = self.course.clock.monotonic()
            case Blow.KILLED_BEFORE:
                self.process.die()
            case Blow.FROZEN_BEFORE:
                self.course.freeze(self.process)
                return None
            case Blow.ROLLED_BACK:
                self.course.restore()
                return None
        return mishap

    def applied(self, mishap: Mishap, answers: list[Any]) -> list[Any] | None:
        if mishap is Fault.LOST:
            return None
        if mishap is Blow.KILLED_AFTER:
            self.process.die()
        self.course.freeze(self.process)
        return answers

    def _require_pause(self, message: Message) -> None:
        """Whoever is cut off has to be told: a client that tries again by itself hides how long it took (D10), and
        does a change twice (M1). Nobody who is told asks again in the same instant."""
        if self._cut_at == self.course.clock.monotonic() and message.commands != ("UNWATCH",):
            self.course.wrong.append(f"sent again behind the back of the one who was cut off: {message}")
