"""What goes on in the drill's Redis, in one look of a few round trips."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import redis

from worker.state.codec import decode
from worker.state.keys import Keys
from worker.state.lease import epoch_number
from worker.state.standing import text


@dataclass(frozen=True)
class Owned:
    """A task that somebody is running."""

    task: str
    pid: int
    epoch: int


@dataclass(frozen=True)
class Look:
    """`progress` changes whenever anything does."""

    at: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    owned: tuple[Owned, ...] = ()
    recovered: int = 0
    progress: tuple[int, ...] = ()


def look(client: redis.Redis, keys: Keys, at: float) -> Look:
    """Raises redis.RedisError while the server is away."""
    names = ("queued", "running", "parked", "finished")
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.zcard(keys.index(name))
        pipe.zrange(keys.index("running"), 0, -1)
        pipe.hget(keys.counters(), "recovered")
        pipe.xlen(keys.feed())
        *counts, members, recovered, told = pipe.execute()
    ids = [text(member) for member in members]
    with client.pipeline(transaction=False) as pipe:
        for task_id in ids:
            pipe.hget(keys.task(task_id), "owner")
            pipe.get(keys.epoch(task_id))
            pipe.hget(keys.checkpoint(task_id), "seq")
        replies = pipe.execute() if ids else []
    owned, seqs = [], []
    for number, task_id in enumerate(ids):
        owner, fence, seq = replies[3 * number : 3 * number + 3]
        seqs.append(int(seq or 0))
        if pid := _pid(owner):
            owned.append(Owned(task_id, pid, epoch_number(fence)))
    progress = (*counts, told, sum(seqs))
    return Look(at, dict(zip(names, counts, strict=True)), tuple(owned), int(recovered or 0), progress)


@dataclass(frozen=True)
class Acknowledged:
    """What Redis said of a task at some moment, to be held against what it says later."""

    status: str
    ended: tuple[str, str, str] | None  # status, result, time of the end
    seq: int
    turns: int
    tokens: int


def acknowledged(client: redis.Redis, keys: Keys, ids: list[str]) -> dict[str, Acknowledged | None]:
    """None for a task that is not there."""
    with client.pipeline(transaction=False) as pipe:
        for task_id in ids:
            pipe.hmget(keys.task(task_id), "status", "result", "finishedAtMs")
            pipe.hmget(keys.checkpoint(task_id), "seq", "turns", "totalTokens")
        replies: list[Any] = pipe.execute()
    found: dict[str, Acknowledged | None] = {}
    for task_id, task, step in zip(ids, replies[::2], replies[1::2], strict=True):
        status, result, finished = (text(part) for part in task)
        seq, turns, tokens = (int(part or 0) for part in step)
        end = (status, result, finished) if finished else None
        found[task_id] = Acknowledged(status, end, seq, turns, tokens) if status else None
    return found


def forgotten(before: dict[str, Acknowledged | None], after: dict[str, Acknowledged | None]) -> dict[str, str]:
    """Task → what Redis had acknowledged of it and does not know any more."""
    found = {}
    for task_id, was in before.items():
        now = after.get(task_id)
        if was is None:
            continue
        if now is None:
            found[task_id] = "the task itself"
        elif was.ended and was.ended != now.ended:
            found[task_id] = f"its end: {was.ended[0]} became {now.status}"
        elif (now.seq, now.turns, now.tokens) < (was.seq, was.turns, was.tokens) or now.turns < was.turns:
            found[task_id] = f"its progress: step {was.seq} of turn {was.turns} became {now.seq} of {now.turns}"
    return found


def _pid(owner: bytes | None) -> int:
    try:
        return int(decode(owner or b"{}").get("pid", 0))
    except (ValueError, AttributeError):
        return 0
