"""Reading tasks: snapshots, lists, progress. Writes nothing; small fields first, bodies only where one is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from worker.clock import Clock, SystemClock
from worker.errors import CheckpointDamaged, InvalidInput, TaskNotFound
from worker.state.codec import decode
from worker.state.keys import INDEXES, Keys
from worker.state.standing import text
from worker.state.task import Status, Task

LIST_MAX = 1_000
_NOT_QUEUED = frozenset(Status) - {Status.QUEUED}


@dataclass(frozen=True)
class Row:
    """One line of a list. `status` is a Status, or what stands in its place in a damaged record. `score_ms`: the time
    its index goes by."""

    task_id: str
    status: str
    queue: str
    turns: int
    total_tokens: int
    attempts: int
    crashes: int
    created_at_ms: int
    score_ms: float
    reason: str
    excerpt: str


@dataclass(frozen=True)
class Event:
    """One entry of a task's stream. `cursor` resumes after it."""

    cursor: str
    kind: str
    at_ms: int
    data: dict[str, Any]


@dataclass(frozen=True)
class Queued:
    """What the sweeper looks at for a queued task. `redeliveries`: how often it was delivered again since its last
    claim. `delivery` is 0 where it cannot be read."""

    task_id: str
    delivery: int
    queue: str
    redeliveries: int


@dataclass(frozen=True)
class Running:
    """What the sweeper looks at for a running task."""

    task_id: str
    fence: str
    locked: bool
    deadline_ms: float
    owner: dict[str, Any]
    beat: str  # the connection that keeps the lease: `server's run id:client id`
    open_call: str  # the side effect it may be in the middle of


class Views:
    """Queries over one Redis client."""

    def __init__(self, client: redis.Redis, keys: Keys, clock: Clock | None = None) -> None:
        self.client: Any = client  # redis-py types every answer as bytes or str; ours are bytes
        self.keys = keys
        self.clock = clock or SystemClock()

    def now_ms(self) -> int:
        """The server's clock."""
        return self.clock.server_ms(self.client.time())

    def task(self, task_id: str) -> Task:
        """The whole record. Raises TaskNotFound; CheckpointDamaged if it is not readable."""
        raw = self.client.hgetall(self.keys.task(task_id))
        if not raw:
            raise TaskNotFound(task_id)
        try:
            return Task.read(task_id, raw)
        except (ValueError, KeyError) as error:
            raise _unreadable(task_id, error) from error

    def status(self, task_id: str) -> Status:
        raw = self.client.hget(self.keys.task(task_id), "status")
        if raw is None:
            raise TaskNotFound(task_id)
        try:
            return Status(text(raw))
        except ValueError as error:
            raise _unreadable(task_id, error) from error

    def progress(self, task_id: str) -> dict[str, Any]:
        """turns, tokensUsed, totalTokens, pendingToolUse, messageCount, as far as they can be read."""
        names = ("turns", "tokensUsed", "totalTokens", "pendingToolUse", "messageCount")
        values = self.client.hmget(self.keys.checkpoint(task_id), names)
        found: dict[str, Any] = {}
        for name, raw in zip(names, values, strict=True):
            try:
                found[name] = None if raw is None else decode(raw)
            except ValueError:
                found[name] = f"unreadable: {text(raw)[:60]!r}"
        return found

    def counts(self) -> dict[str, int]:
        """Tasks in each index; `finished` holds all that ended within the retention time."""
        with self.client.pipeline(transaction=False) as pipe:
            for name in INDEXES:
                pipe.zcard(self.keys.index(name))
            return dict(zip(INDEXES, pipe.execute(), strict=True))

    def rows(self, indexes: Sequence[str] = INDEXES, limit: int = 50) -> list[Row]:
        """The newest tasks of these indexes, newest first."""
        found: list[Row] = []
        for name in indexes:
            members = self.client.zrevrange(self.keys.index(name), 0, min(limit, LIST_MAX) - 1, withscores=True)
            found += self._rows([(text(member), score) for member, score in members])
        return sorted(found, key=lambda row: row.created_at_ms, reverse=True)[:limit]

    def resolve(self, prefix: str) -> str:
        """The task id that begins with `prefix`. Raises TaskNotFound, or InvalidInput if several do."""
        if self.client.exists(self.keys.task(prefix)):
            return prefix
        found: list[str] = []
        for name in INDEXES:
            # Members come in any order and the index may be long; ids are short, so the server scans for us.
            for member, _ in self.client.zscan_iter(self.keys.index(name), match=f"{_glob(prefix)}*", count=1000):
                found.append(text(member))
                if len(set(found)) > 1:
                    raise InvalidInput(f"{prefix!r} begins the ids of several tasks: {', '.join(sorted(set(found)))} …")
        if not found:
            raise TaskNotFound(prefix)
        return found[0]

    def events(self, task_id: str, after: str = "0", *, block_ms: int | None = None, limit: int = 500) -> list[Event]:
        """Events after a cursor; waits up to `block_ms`, which must be below the client's timeout."""
        reply: Any = self.client.xread({self.keys.events(task_id): after}, count=limit, block=block_ms)
        streams = reply.values() if isinstance(reply, dict) else [entries for _, entries in reply or []]
        return [self._event(cursor, fields) for entries in streams for cursor, fields in _flat(entries)]

    # -- for the sweeper: small keys only, in batches ------------------------------------------------------

    def running(self, batch: int = 500) -> Iterator[Running]:
        """Every running task, with what proves or disproves that its holder is alive. What cannot be read is
        left empty: the verb that acts on the task will say what is wrong with it."""
        # The index at once: read by rank in pieces, it would move under our feet while tasks are recovered.
        everything = self.client.zrange(self.keys.index("running"), 0, -1, withscores=True)
        for start in range(0, len(everything), batch):
            yield from self._running([(text(member), score) for member, score in everything[start : start + batch]])

    def holder_of(self, task_id: str) -> Running | None:
        """The same of one task; None if it is not running."""
        deadline = self.client.zscore(self.keys.index("running"), task_id)
        return None if deadline is None else next(self._running([(task_id, deadline)]))

    def _running(self, members: Sequence[tuple[str, float]]) -> Iterator[Running]:
        with self.client.pipeline(transaction=False) as pipe:
            for task_id, _ in members:
                pipe.get(self.keys.epoch(task_id))
                pipe.exists(self.keys.lock(task_id))
                pipe.hmget(self.keys.task(task_id), "owner", "beat", "openCall")
            replies = pipe.execute(raise_on_error=False)
        for number, (task_id, deadline) in enumerate(members):
            answers = replies[3 * number : 3 * number + 3]
            fence, locked, about = (None if isinstance(reply, Exception) else reply for reply in answers)
            owner, beat, open_call = about or (None, None, None)
            yield Running(
                task_id, text(fence), bool(locked), deadline, _document(owner), text(beat), text(open_call)
            )  # fmt: skip

    def queued(self, start: int, limit: int, *, also: Iterable[str] = ()) -> list[Queued]:
        """Queued tasks from a rank in the index on, longest waiting first, and those of `also` that are queued."""
        members = self.client.zrange(self.keys.index("queued"), start, start + limit - 1)
        ids = list(dict.fromkeys([*map(text, members), *also]))
        with self.client.pipeline(transaction=False) as pipe:
            for task_id in ids:
                pipe.hmget(self.keys.task(task_id), "delivery", "queue", "redeliveries", "status")
            replies = pipe.execute(raise_on_error=False)
        found = [(None, None, None, None) if isinstance(reply, Exception) else reply for reply in replies]
        return [
            Queued(task_id, _number(delivery), text(queue), _number(redeliveries))
            for task_id, (delivery, queue, redeliveries, status) in zip(ids, found, strict=True)
            if text(status) not in _NOT_QUEUED
        ]

    def waiting_for(self, what: str) -> list[str]:
        """Parked tasks that wait for that, in a word (`api`, …)."""
        ids = [text(member) for member in self.client.zrange(self.keys.index("parked"), 0, -1)]
        with self.client.pipeline(transaction=False) as pipe:
            for task_id in ids:
                pipe.hget(self.keys.task(task_id), "waitsFor")
            found = pipe.execute(raise_on_error=False)
        return [task_id for task_id, word in zip(ids, found, strict=True) if word == what.encode()]

    def due(self, name: str, until_ms: float, limit: int) -> list[str]:
        """Members of an index whose time has come."""
        members = self.client.zrangebyscore(self.keys.index(name), "-inf", until_ms, start=0, num=limit)
        return [text(member) for member in members]

    def _rows(self, members: Sequence[tuple[str, float]]) -> list[Row]:
        fields = ("status", "queue", "attempts", "crashes", "createdAtMs", "reason", "textStart")
        with self.client.pipeline(transaction=False) as pipe:
            for task_id, _ in members:
                pipe.hmget(self.keys.task(task_id), fields)
                pipe.hmget(self.keys.checkpoint(task_id), "turns", "totalTokens")
            replies = pipe.execute(raise_on_error=False)
        rows = []
        for (task_id, score), about, progress in zip(members, replies[::2], replies[1::2], strict=True):
            if isinstance(about, Exception) or about[0] is None:
                continue  # expired, and not yet dropped from the index
            turns, tokens = (None, None) if isinstance(progress, Exception) else progress
            status, queue, attempts, crashes, created, reason, excerpt = about
            rows.append(
                Row(
                    task_id,
                    text(status),
                    text(queue),
                    _number(turns),
                    _number(tokens),
                    _number(attempts),
                    _number(crashes),
                    _number(created),
                    score,
                    text(reason),
                    text(excerpt),
                )
            )
        return rows

    def _event(self, cursor: bytes, fields: dict[bytes, bytes]) -> Event:
        data = _document(fields.get(b"data"))
        return Event(text(cursor), text(fields.get(b"type")), int(fields.get(b"atMs", b"0")), data)


def _unreadable(task_id: str, error: Exception) -> CheckpointDamaged:
    return CheckpointDamaged(f"the record of task {task_id} is not readable: {error}")


def _document(raw: bytes | None) -> dict[str, Any]:
    try:
        value = decode(raw or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _number(raw: bytes | None) -> int:
    return int(raw) if raw is not None and raw.isdigit() else 0


def _flat(entries: Any) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    """RESP3 nests a stream's entries once more than RESP2."""
    for entry in entries:
        if entry and isinstance(entry[0], list | tuple):
            yield from _flat(entry)
        else:
            yield entry


def _glob(text_: str) -> str:
    return "".join(f"\\{c}" if c in "*?[]\\^" else c for c in text_)
