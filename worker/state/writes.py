"""The writes that verbs share, queued into a verb's MULTI. Called by `store.py` alone; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from redis.client import Pipeline

from worker.state import events
from worker.state.budget import WAITS
from worker.state.checkpoint import Checkpoint, Message, pending_document
from worker.state.codec import encode
from worker.state.keys import INDEXES, Keys, call_field, lapsed_field
from worker.state.lease import Holder, epoch_number
from worker.state.ledger import Call
from worker.state.standing import Standing
from worker.state.task import NewTask, ParkNote, Status


class Dispatcher(Protocol):
    """Puts wake-ups on a queue and takes them off, inside our MULTI."""

    def push(self, pipe: Pipeline, task_id: str, delivery: int, queue: str, *, at_front: bool = False) -> None: ...
    def drop(self, pipe: Pipeline, task_id: str, delivery: int, queue: str) -> None: ...
    def retire(self, pipe: Pipeline, task_id: str, delivery: int) -> None: ...
    def requeued_by_hand(self, task_id: str, delivery: int, queue: str) -> bool: ...


@dataclass(frozen=True)
class Writes:
    """Writers of one task's keys under one prefix."""

    keys: Keys
    dispatcher: Dispatcher
    retention_s: int

    def tell(self, pipe: Pipeline, task_id: str, kind: str, now: int, /, **data: Any) -> None:
        events.tell(pipe, self.keys, task_id, kind, now, **data)

    def queue(
        self, pipe: Pipeline, task_id: str, delivery: int, queue: str, now: int, kind: str,
        *, at_front: bool = False, reason: str = "", **data: Any,
    ) -> None:  # fmt: skip
        """Status queued, with a fresh RQ job: RQ keeps old ttls on a job id that is used again."""
        self.move(pipe, task_id, Status.QUEUED, now, now, delivery=delivery, reason=reason, wakeAtMs="")
        self.dispatcher.push(pipe, task_id, delivery, queue, at_front=at_front)
        self.tell(pipe, task_id, kind, now, delivery=delivery, **data)

    def park(
        self, pipe: Pipeline, task_id: str, wake_at: int | None, now: int, kind: str,
        *, reason: str, deadline: int | None = None, **data: Any,
    ) -> None:  # fmt: skip
        """Status parked; `wake_at` None waits for a person. Nobody waits longer than until the task's `deadline`."""
        wake_at = min((at for at in (wake_at, deadline) if at is not None), default=None)
        score = float("inf") if wake_at is None else wake_at
        self.move(pipe, task_id, Status.PARKED, score, now, reason=reason, wakeAtMs=wake_at or "")
        self.tell(pipe, task_id, kind, now, reason=reason, wakeAtMs=wake_at, **data)

    def noted_park(self, pipe: Pipeline, task_id: str, note: ParkNote, now: int) -> None:
        task = self.keys.task(task_id)
        pipe.hincrby(task, "parks", 1)
        if not note.spends_attempt:
            pipe.hincrby(task, "attempts", -1)
        streak: dict[Any, Any] = {"parkStreak": note.streak, "parkedAtTurns": note.turns}
        pipe.hset(task, mapping={**streak, "waitsFor": note.waits_for, "parkTicket": note.ticket})
        if note.waits_for.startswith(WAITS):
            pipe.zadd(self.keys.budget_waiting(), {task_id: now})

    def end(
        self, pipe: Pipeline, task_id: str, status: Status, now: int,
        *, reason: str = "", result: str = "", error: str = "",
    ) -> None:  # fmt: skip
        """A terminal status; all keys of the task get the same expiry."""
        self.move(
            pipe, task_id, status, now, now, reason=reason, result=result, error=error, finishedAtMs=now
        )  # fmt: skip
        self.tell(pipe, task_id, "ended", now, status=status.value, reason=reason)
        for key in self.keys.of_task(task_id):
            pipe.pexpireat(key, now + self.retention_s * 1000)

    def revoke(self, pipe: Pipeline, task_id: str, epoch: int, at: Standing) -> None:
        """Nobody owns the task: a new epoch without a token, no lock, and its place is free. The only way out of
        running."""
        pipe.set(self.keys.epoch(task_id), f"{epoch + 1}:")
        pipe.delete(self.keys.lock(task_id))
        if at.concurrency_key:
            pipe.srem(self.keys.slots(at.concurrency_key), task_id)

    def line_up(self, pipe: Pipeline, task_id: str, at: Standing, since: int, wake_at: int) -> None:
        """Parked until one of the places of its key is free; `since` says whose turn is first."""
        key, places = at.concurrency_key, at.concurrency
        fields: dict[Any, Any] = {"waitsFor": f"slot:{key}", "slotSinceMs": since}
        pipe.hset(self.keys.task(task_id), mapping=fields)
        pipe.zadd(self.keys.slots_waiting(key), {task_id: since})
        pipe.sadd(self.keys.slots_wanted(), key)
        why = f"waits for {'the only place' if places == 1 else f'one of the {places} places'} of {key}"
        self.park(
            pipe, task_id, wake_at, at.now_ms, "parked", reason=why, deadline=at.deadline_ms, waitsFor=f"slot:{key}"
        )  # fmt: skip

    def leave_line(self, pipe: Pipeline, task_id: str, at: Standing) -> None:
        if at.concurrency_key:
            pipe.zrem(self.keys.slots_waiting(at.concurrency_key), task_id)

    def move(self, pipe: Pipeline, task_id: str, status: Status, score: float, now: int, **fields: Any) -> None:
        """Set the status and be listed in its index only."""
        mapping: dict[Any, Any] = {"status": status.value, "changedAtMs": now, **fields}
        pipe.hset(self.keys.task(task_id), mapping=mapping)
        for name in INDEXES:
            if name != status.listed_in:
                pipe.zrem(self.keys.index(name), task_id)
        pipe.zadd(self.keys.index(status.listed_in), {task_id: score})

    # -- the longer ones of single verbs -------------------------------------------------------------------

    def new(self, pipe: Pipeline, new: NewTask, nonce: str, now: int) -> None:
        deadline = None if new.deadline_ms is None else now + new.deadline_ms
        fields: dict[Any, Any] = {**new.fields(), "nonce": nonce, "createdAtMs": now, "deadlineMs": deadline or ""}
        pipe.hset(self.keys.task(new.task_id), mapping=fields)
        if new.dedupe_key:
            pipe.set(self.keys.dedupe(new.dedupe_key), new.task_id, px=self.retention_s * 1000)
        if new.delay_ms:
            wake_at = now + new.delay_ms
            self.park(
                pipe, new.task_id, wake_at, now, "created", reason="waits for its start time", deadline=deadline
            )  # fmt: skip
        else:
            self.queue(pipe, new.task_id, 1, new.queue, now, "created")

    def owned(self, pipe: Pipeline, task_id: str, fence: str, lease_ttl_ms: int, at: Standing, owner: bytes) -> None:
        pipe.set(self.keys.lock(task_id), fence, px=lease_ttl_ms)
        pipe.set(self.keys.epoch(task_id), fence)
        deadline = at.now_ms + lease_ttl_ms
        if at.concurrency_key:
            pipe.sadd(self.keys.slots(at.concurrency_key), task_id)
            pipe.hset(self.keys.task(task_id), "slotSinceMs", at.slot_since_ms or at.now_ms)
        self.leave_line(pipe, task_id, at)
        fields = {
            "attempts": at.attempts + 1,
            "owner": owner,
            "reason": "",
            "redeliveries": 0,
            "beat": "",
            "openCall": "",
        }
        self.move(pipe, task_id, Status.RUNNING, deadline, at.now_ms, **fields)
        self.tell(pipe, task_id, "claimed", at.now_ms, attempt=at.attempts + 1, epoch=epoch_number(fence))

    def recovered(
        self, pipe: Pipeline, task_id: str, at: Standing, status: Status, crashes: int, in_row: int, proof: str,
        *, drained: bool = False,
    ) -> None:  # fmt: skip
        epoch = epoch_number(at.fence)
        self.revoke(pipe, task_id, epoch, at)
        self.dispatcher.retire(pipe, task_id, at.delivery)
        pipe.hset(self.keys.task(task_id), mapping={"crashes": crashes, "crashesInRow": in_row})
        told: dict[str, Any] = {"proof": proof, "crashes": crashes, "epoch": epoch}
        kind = "recovered"
        if drained:
            kind = "handed-over"
            pipe.hincrby(self.keys.task(task_id), "handOvers", 1)
        if status is Status.QUEUED:
            self.queue(pipe, task_id, at.delivery + 1, at.queue, at.now_ms, kind, at_front=True, **told)
        else:
            self.tell(pipe, task_id, kind, at.now_ms, **told)
            why = at.cancel or f"crashed {in_row} times in a row, {crashes} in all; the last time: {proof}"
            self.end(pipe, task_id, status, at.now_ms, reason=why)

    def may_live_on(self, pipe: Pipeline, task_id: str, epoch: int, now: int) -> None:
        """This ownership ends, and its process is not proven dead: it may yet do what it is in the middle of."""
        pipe.hset(self.keys.started(task_id), lapsed_field(epoch), now)

    def handed_over(
        self, pipe: Pipeline, holder: Holder, at: Standing, reason: str,
        *, abandoned: bool, midway: bool, undone: Call | None,
    ) -> None:  # fmt: skip
        task, started = self.keys.task(holder.task_id), self.keys.started(holder.task_id)
        pipe.hincrby(task, "handOvers", 1)
        if abandoned:
            pipe.hincrby(task, "abandonedCalls", 1)
        if midway:
            self.may_live_on(pipe, holder.task_id, holder.epoch, at.now_ms)
        if undone is not None:
            pipe.hdel(started, call_field(undone.turn, undone.id))
        how: dict[str, Any] = {"at_front": True, "why": reason, "abandoned": abandoned, "midway": midway}
        self.queue(pipe, holder.task_id, at.delivery + 1, at.queue, at.now_ms, "handed-over", **how)

    def afresh(self, pipe: Pipeline, task_id: str, mark: str, limits: Mapping[str, int | None]) -> None:
        """`limits`: task fields to change; None leaves one as it is."""
        for key in self.keys.of_task(task_id):
            pipe.persist(key)
        pipe.hdel(self.keys.control(task_id), "cancel")
        fields: dict[Any, Any] = {"crashes": 0, "crashesInRow": 0, "retried": mark}
        pipe.hset(self.keys.task(task_id), mapping={**fields, "finishedAtMs": "", "result": "", "error": ""})
        for name, limit in limits.items():
            if limit is not None:
                pipe.hset(self.keys.task(task_id), name, limit)

    def step(self, pipe: Pipeline, task_id: str, message: Message | None, checkpoint: Checkpoint) -> None:
        """A message (if it is kept) and the checkpoint after it. Costs what this step added, not the history."""
        if message is not None:
            pipe.rpush(self.keys.messages(task_id), encode(message))
        pending = encode(pending_document(checkpoint.pending)) if checkpoint.pending else b"null"
        fields: dict[Any, Any] = {
            "turns": checkpoint.turns,
            "tokensUsed": encode(checkpoint.tokens_used),
            "totalTokens": checkpoint.total_tokens,
            "pendingToolUse": pending,
            "messageCount": len(checkpoint.messages),
            "stopReason": checkpoint.stop_reason,
            "serverRunId": checkpoint.server_run_id,
        }
        pipe.hset(self.keys.checkpoint(task_id), mapping=fields)
