"""Where a task stands: the few small fields a verb decides on, read in one round trip under WATCH."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.clock import Clock
from worker.errors import CheckpointDamaged, TaskNotFound
from worker.state.keys import Keys
from worker.state.task import Status

_FIELDS = (
    "status", "queue", "delivery", "attempts", "crashes", "crashesInRow", "concurrency", "slotSinceMs", "deadlineMs",
    "waitsFor", "budgetOpen", "concurrencyKey", "released", "retried", "nonce", "digest", "change", "beat", "openCall",
    "leaving",
)  # fmt: skip


@dataclass(frozen=True)
class Standing:
    """`exists` is False for an unknown or expired task; then only `now_ms` means anything."""

    exists: bool
    status: Status
    delivery: int
    queue: str
    attempts: int
    crashes: int
    crashes_in_row: int
    released: str
    retried: str
    nonce: str
    digest: str
    change: str
    beat: str
    open_call: str
    leaving: str
    waits_for: str
    budget_open: str
    concurrency_key: str
    concurrency: int
    slot_since_ms: int
    deadline_ms: int | None
    fence: str
    locked: bool
    cancel: str | None
    now_ms: int

    def require(self, task_id: str) -> Standing:
        if not self.exists:
            raise TaskNotFound(task_id)
        return self


def standing_reads(keys: Keys, task_id: str) -> list[tuple[str, ...]]:
    """The commands whose answers `read_standing` takes, in order."""
    return [
        ("HMGET", keys.task(task_id), *_FIELDS),
        ("GET", keys.epoch(task_id)),
        ("EXISTS", keys.lock(task_id)),
        ("HGET", keys.control(task_id), "cancel"),
        ("TIME",),
    ]


def read_standing(replies: list[Any], clock: Clock) -> Standing:
    (status, queue, *fields), fence, locked, cancel, time = replies
    counts, names = fields[:7], (text(name) for name in fields[7:])
    waits, budget, key, released, retried, nonce, digest, change, beat, open_call, leaving = names
    try:
        now = Status(text(status)) if status is not None else Status.QUEUED
        numbers = [int(count or 0) for count in counts]
    except ValueError as error:
        raise CheckpointDamaged(f"the task's own record is not readable: {str(error)[:200]}") from None
    return Standing(
        exists=status is not None,
        status=now,
        delivery=numbers[0],
        queue=text(queue),
        attempts=numbers[1],
        crashes=numbers[2],
        crashes_in_row=numbers[3],
        released=released,
        retried=retried,
        nonce=nonce,
        digest=digest,
        change=change,
        beat=beat,
        open_call=open_call,
        leaving=leaving,
        waits_for=waits,
        budget_open=budget,
        concurrency_key=key,
        concurrency=numbers[4],
        slot_since_ms=numbers[5],
        deadline_ms=numbers[6] or None,
        fence=text(fence),
        locked=bool(locked),
        cancel=None if cancel is None else text(cancel),
        now_ms=clock.server_ms(time),
    )


def text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


def number(raw: bytes | None) -> int:
    """0 for what is none: a damaged field of one task must not stop who looks over many."""
    return int(raw) if raw and raw.isdigit() else 0


@dataclass(frozen=True)
class Refused:
    """A claim that was not granted. No trouble: deliveries may be stale or doubled. `current`: it was the task's
    latest delivery, and the task is not queued. `ended`: its deadline had passed, so that claim ended it."""

    why: str
    status: Status | None = None
    queue: str = ""
    current: bool = False
    ended: bool = False


def refusal(at: Standing, delivery: int) -> Refused | None:
    """Why a task that stands so cannot be claimed for this delivery; None if it can."""
    if not at.exists:
        return Refused("no such task: it has expired or was never accepted")
    if at.delivery != delivery:
        return Refused(f"stale delivery {delivery}, the current one is {at.delivery}", at.status, at.queue)
    if at.status is not Status.QUEUED:
        return Refused(f"the task is {at.status}", at.status, at.queue, current=True)
    if at.locked:
        return Refused("somebody holds the task's lock", at.status, at.queue)
    return None
