"""Where a task stands: the few small fields a verb decides on, read in one round trip under WATCH."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.clock import Clock
from worker.errors import TaskNotFound
from worker.state.keys import Keys
from worker.state.task import Status

_FIELDS = (
    "status", "delivery", "queue", "attempts", "crashes", "crashesInRow", "released", "retried", "nonce", "digest",
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
    (status, delivery, queue, attempts, crashes, in_row, *names), fence, locked, cancel, time = replies
    released, retried, nonce, digest = (text(name) for name in names)
    return Standing(
        exists=status is not None,
        status=Status(text(status)) if status is not None else Status.QUEUED,
        delivery=int(delivery or 0),
        queue=text(queue),
        attempts=int(attempts or 0),
        crashes=int(crashes or 0),
        crashes_in_row=int(in_row or 0),
        released=released,
        retried=retried,
        nonce=nonce,
        digest=digest,
        fence=text(fence),
        locked=bool(locked),
        cancel=None if cancel is None else text(cancel),
        now_ms=clock.server_ms(time),
    )


def text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


@dataclass(frozen=True)
class Refused:
    """A claim that was not granted. No trouble: deliveries may be stale or doubled."""

    why: str
    status: Status | None = None


def refusal(at: Standing, delivery: int) -> Refused | None:
    """Why a task that stands so cannot be claimed for this delivery; None if it can."""
    if not at.exists:
        return Refused("no such task: it has expired or was never accepted")
    if at.delivery != delivery:
        return Refused(f"stale delivery {delivery}, the current one is {at.delivery}", at.status)
    if at.status is not Status.QUEUED:
        return Refused(f"the task is {at.status}", at.status)
    if at.locked:
        return Refused("somebody holds the task's lock", at.status)
    return None
