"""A task as stored: what was asked, and where it stands. The camelCase of Redis ends in this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from worker.state.codec import decode, digest, encode


class Status(StrEnum):
    """Where a task stands. The last four are the ends."""

    QUEUED = "queued"
    RUNNING = "running"
    PARKED = "parked"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DEAD = "dead"

    @property
    def ended(self) -> bool:
        return self in _ENDED

    @property
    def listed_in(self) -> str:
        """The zset that lists tasks of this status."""
        return "finished" if self.ended else self.value


_ENDED = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.DEAD})


@dataclass(frozen=True)
class NewTask:
    """What a client asks for. `tools`: names the task may use, None = all. `delay_ms`: first run not before.
    `deadline_ms`: over by then, counted from its acceptance. At most `concurrency` tasks of one `concurrency_key` run
    at once; "" for a task that has none."""

    task_id: str
    text: str
    queue: str
    model: str = ""
    system: str = ""
    turns_max: int = 40
    tokens_max: int | None = None
    tools: tuple[str, ...] | None = None
    tags: tuple[str, ...] = ()
    dedupe_key: str | None = None
    delay_ms: int = 0
    deadline_ms: int | None = None
    concurrency_key: str = ""
    concurrency: int = 0

    def digest(self) -> str:
        """Names the request without its id: the same id with another digest is another request."""
        asked: list[Any] = [self.text, self.queue, self.model, self.system, self.turns_max, self.tokens_max]
        asked += [None if self.tools is None else list(self.tools), list(self.tags), self.delay_ms]
        # Only if asked for: a request without them has the digest that it always had.
        asked += [] if self.deadline_ms is None else ["deadline", self.deadline_ms]
        asked += ["concurrency", self.concurrency_key, self.concurrency] if self.concurrency_key else []
        return digest(asked)

    def fields(self) -> dict[str, str | int | bytes]:
        """The hash fields that are written once."""
        return {
            "text": self.text,
            "textStart": " ".join(self.text[:400].split())[:120],
            "queue": self.queue,
            "model": self.model,
            "system": self.system,
            "maxTurns": self.turns_max,
            "maxTokensTotal": "" if self.tokens_max is None else self.tokens_max,
            "tools": b"" if self.tools is None else encode(list(self.tools)),
            "tags": encode(list(self.tags)),
            "dedupeKey": self.dedupe_key or "",
            "concurrencyKey": self.concurrency_key,
            "concurrency": self.concurrency or "",
            "digest": self.digest(),
        }


def too_late(deadline_ms: int) -> str:
    """What is said of a task that ends because its deadline has passed."""
    return f"deadline {utc(deadline_ms)} has passed (--deadline)"


def utc(ms: float) -> str:
    """A moment of the server's clock, for people."""
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True)
class Created:
    """Outcome of create. `existed`: the same request was accepted before; nothing was enqueued now."""

    task_id: str
    existed: bool


@dataclass(frozen=True)
class ParkNote:
    """How often in a row the task was parked after `turns` turns, for longer and longer waits. `waits_for`: what it
    waits for, in a word; `ticket`: what lets it through when it is back."""

    streak: int = 0
    turns: int = -1
    spends_attempt: bool = True
    waits_for: str = ""
    ticket: str = ""


@dataclass(frozen=True)
class Task:
    """One task's hash, decoded. Times are ms since 1970 of the Redis server's clock; None = not yet."""

    task_id: str
    text: str
    queue: str
    model: str
    system: str
    turns_max: int
    tokens_max: int | None
    tools: tuple[str, ...] | None
    tags: tuple[str, ...]
    status: Status
    delivery: int
    attempts: int
    crashes: int
    crashes_in_row: int
    hand_overs: int
    abandoned_calls: int  # model calls given up for a hand-over
    parks: int
    parked: ParkNote
    owner: dict[str, Any]
    reason: str
    result: str
    error: str
    created_at_ms: int
    changed_at_ms: int
    wake_at_ms: int | None
    finished_at_ms: int | None
    request: bytes | None
    deadline_ms: int | None = None
    concurrency_key: str = ""
    concurrency: int = 0
    open_budget: bytes = b""

    @classmethod
    def read(cls, task_id: str, raw: Mapping[bytes, bytes]) -> Task:
        """Decode HGETALL's answer; raises ValueError or KeyError where it is not a task's hash."""

        def text(name: str) -> str:
            return raw.get(name.encode(), b"").decode("utf-8", "replace")

        def number(name: str) -> int:
            return int(raw.get(name.encode()) or 0)

        def maybe(name: str) -> int | None:
            return number(name) if raw.get(name.encode()) else None

        def names(name: str) -> tuple[str, ...]:
            return tuple(decode(raw.get(name.encode()) or b"[]"))

        return cls(
            task_id=task_id,
            text=text("text"),
            queue=text("queue"),
            model=text("model"),
            system=text("system"),
            turns_max=number("maxTurns"),
            tokens_max=maybe("maxTokensTotal"),
            tools=names("tools") if raw.get(b"tools") else None,
            tags=names("tags"),
            status=Status(text("status")),
            delivery=number("delivery"),
            attempts=number("attempts"),
            crashes=number("crashes"),
            crashes_in_row=number("crashesInRow"),
            hand_overs=number("handOvers"),
            abandoned_calls=number("abandonedCalls"),
            parks=number("parks"),
            parked=ParkNote(
                number("parkStreak"),
                number("parkedAtTurns") if raw.get(b"parkedAtTurns") else -1,
                waits_for=text("waitsFor"),
                ticket=text("parkTicket"),
            ),
            owner=decode(raw.get(b"owner") or b"{}"),
            reason=text("reason"),
            result=text("result"),
            error=text("error"),
            created_at_ms=number("createdAtMs"),
            changed_at_ms=number("changedAtMs"),
            wake_at_ms=maybe("wakeAtMs"),
            finished_at_ms=maybe("finishedAtMs"),
            request=raw.get(b"request"),
            deadline_ms=maybe("deadlineMs"),
            concurrency_key=text("concurrencyKey"),
            concurrency=number("concurrency"),
            open_budget=raw.get(b"budgetOpen", b""),
        )
