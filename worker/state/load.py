"""All a new holder needs to go on, read once after the claim and checked before anything is believed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import redis

from worker.errors import CheckpointDamaged
from worker.state.budget import Open, scopes_of
from worker.state.checkpoint import Checkpoint, read_checkpoint
from worker.state.codec import decode
from worker.state.keys import Keys, call_field, lapsed_field, resolution_field
from worker.state.lease import Holder
from worker.state.ledger import Entry, Marker, Resolution
from worker.state.server import ServerProbe
from worker.state.task import Task
from worker.state.transact import error_code, patiently

T = TypeVar("T")


@dataclass(frozen=True)
class Calls:
    """What is known of the pending calls, by call id."""

    entries: dict[str, Entry] = field(default_factory=dict)
    markers: dict[str, Marker] = field(default_factory=dict)
    resolutions: dict[str, Resolution] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """`request` and `checkpoint` are None before the first `begin`. `markers_trusted`: Redis lost nothing since A, so
    that a missing marker proves something (with nothing pending there is nothing to prove). `history_whole`: nor
    anything else since, as far as can be told. `deadline_at`: the task's deadline by the holder's own clock; None: it
    has none."""

    task: Task
    request: dict[str, Any] | None
    checkpoint: Checkpoint | None
    calls: Calls
    markers_trusted: bool
    history_whole: bool = True
    deadline_at: float | None = None


def load(client: redis.Redis, keys: Keys, probe: ServerProbe, holder: Holder) -> Loaded:
    """Read the task as its holder. Raises CheckpointDamaged or CheckpointTooNew, RedisUnavailable or StorageRefused;
    writes nothing but what the holder has to know: `seq`, and of budgets."""

    def read() -> Loaded:
        return _load(client, keys, probe, holder)

    # Reading again is harmless, so a dropped connection is waited for as long as the lease lasts.
    return patiently(read, holder.clock, patience_s=holder.lease_ttl_s, before_each=holder.check)


def _load(client: redis.Redis, keys: Keys, probe: ServerProbe, holder: Holder) -> Loaded:
    task_id = holder.task_id
    try:
        asked_at = holder.clock.monotonic()  # before the server looks at its clock: rather a moment too early
        raw_task, raw_checkpoint, documents, budgets, time, run_id = _fetch(client, keys, probe, task_id)
        task = Task.read(task_id, raw_task)
        request = None if task.request is None else _request(task.request)
    except redis.ResponseError as error:
        raise _damage(error, "a key of the task is not what it should be") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"the task's own record is not readable: {error}") from None
    _learn_budgets(holder, task, budgets)
    left_s = None if task.deadline_ms is None else (task.deadline_ms - holder.clock.server_ms(time)) / 1000
    deadline_at = None if left_s is None else asked_at + left_s
    if not raw_checkpoint and not documents:
        if request is not None:
            raise CheckpointDamaged("checkpoint lost: the task had begun, and nothing of its conversation is stored")
        return Loaded(task, None, None, Calls(), markers_trusted=True, deadline_at=deadline_at)
    checkpoint = read_checkpoint(raw_checkpoint, documents)
    if request is None:
        raise CheckpointDamaged("the frozen request is lost: the conversation cannot be continued as it was")
    holder.seq = checkpoint.seq
    calls = _calls(client, keys, task_id, checkpoint)
    unchanged = checkpoint.server_run_id in ("", run_id)  # none is noted before the first answer
    whole = unchanged or probe.loses_nothing(client)
    sure = whole and bool(checkpoint.server_run_id)
    return Loaded(task, request, checkpoint, calls, not checkpoint.pending or sure, whole, deadline_at)


def _learn_budgets(holder: Holder, task: Task, budgets: set[bytes]) -> None:
    holder.scopes_all = scopes_of(task.tags)
    holder.scopes = tuple(scope for scope in holder.scopes_all if scope.encode() in budgets)
    holder.open = Open.load(task.open_budget)


def _request(raw: bytes) -> dict[str, Any]:
    request = decode(raw)
    if not isinstance(request, dict) or not request:
        raise ValueError("the frozen request is not one")
    return request


def _damage(error: redis.ResponseError, what: str) -> Exception:
    """Only a key of another type is damage; whatever else Redis answers says nothing about the task."""
    return CheckpointDamaged(f"{what}: {error}") if error_code(error) == "WRONGTYPE" else error


def _fetch(
    client: redis.Redis, keys: Keys, probe: ServerProbe, task_id: str
) -> tuple[dict[bytes, bytes], dict[bytes, bytes], list[bytes], set[bytes], Any, str]:
    with client.pipeline(transaction=True) as pipe:
        pipe.hgetall(keys.task(task_id))
        pipe.hgetall(keys.checkpoint(task_id))
        pipe.lrange(keys.messages(task_id), 0, -1)
        pipe.smembers(keys.budgets())
        pipe.time()
        task, checkpoint, documents, budgets, time = pipe.execute()
    replies = [client.execute_command(*command) for command in probe.identity_commands]  # type: ignore[no-untyped-call]
    name = probe.identity(replies)
    return task, checkpoint, documents, budgets, time, name


def _calls(client: redis.Redis, keys: Keys, task_id: str, checkpoint: Checkpoint) -> Calls:
    if not checkpoint.pending:
        return Calls()
    reader: Any = client  # redis-py's types say bytes or str
    pending = {call.id: call_field(call.turn, call.id) for call in checkpoint.pending}
    resolving = [resolution_field(call.turn, call.id) for call in checkpoint.pending]
    try:
        entries = _decoded(pending, reader.hmget(keys.ledger(task_id), list(pending.values())), Entry.load)
        markers = _decoded(pending, reader.hmget(keys.started(task_id), list(pending.values())), Marker.load)
        resolutions = _decoded(pending, reader.hmget(keys.control(task_id), resolving), Resolution.load)
        epochs = sorted({marker.epoch for marker in markers.values()})
        marks = reader.hmget(keys.started(task_id), [lapsed_field(epoch) for epoch in epochs]) if epochs else []
    except redis.ResponseError as error:
        raise _damage(error, "the ledger or a start marker is not readable") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"the ledger or a start marker is not readable: {error}") from None
    lapsed = {epoch for epoch, mark in zip(epochs, marks, strict=True) if mark is not None}
    markers = {id: replace(marker, holder_gone=marker.epoch not in lapsed) for id, marker in markers.items()}
    return Calls(entries, markers, resolutions)


def _decoded(ids: Iterable[str], found: Sequence[bytes | None], read: Callable[[bytes], T]) -> dict[str, T]:
    return {id: read(raw) for id, raw in zip(ids, found, strict=True) if raw is not None}
