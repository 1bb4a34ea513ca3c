"""The verbs of clients and operators; `worker.state.store` has the table of all verbs, and the others."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from redis.client import Pipeline

from worker.errors import StorageRefused, TaskConflict, WrongState
from worker.state.guards import Guards
from worker.state.keys import resolution_field
from worker.state.ledger import Resolution
from worker.state.standing import Standing, text
from worker.state.task import Created, NewTask, Status
from worker.state.transact import CONFLICTS_MAX, Decision, Settled, Write, transact

# A dedupe key answers with its task as long as that is one of these; a task that went wrong may be asked again.
DEDUPES = frozenset({Status.QUEUED, Status.RUNNING, Status.PARKED, Status.SUCCEEDED})

CREATE_BATCH = 100
CREATE_BATCH_BYTES = 2_000_000  # of texts and system prompts; a transaction holds up everybody else


class Asked(Guards):
    """What people ask for."""

    def create(self, new: NewTask) -> Created:
        """Accept a task with its first RQ job, or nothing of either. The same id with the same request is the
        same task, with another request TaskConflict."""
        nonce, dedupe = secrets.token_hex(8), self.keys.dedupe(new.dedupe_key or "-")
        for _ in range(CONFLICTS_MAX):
            named = text(self._get(dedupe)) if new.dedupe_key else ""
            other = self.keys.task(named or new.task_id)

            def decide(at: Standing, extra: list[Any], named: str = named) -> Decision[Created | None]:
                if at.exists and at.nonce != nonce and at.digest != new.digest():
                    raise TaskConflict(new.task_id)
                if at.exists:
                    return Settled(Created(new.task_id, existed=at.nonce != nonce))
                if new.dedupe_key and text(extra[0]) != named:
                    return Settled(None)  # the key moved under our eyes: look again
                if named and text(extra[1]) in DEDUPES:
                    return Settled(Created(named, existed=True))
                return Write(lambda pipe: self.writes.new(pipe, new, nonce, at.now_ms), Created(new.task_id, False))

            reads = [("GET", dedupe), ("HGET", other, "status")]
            created = self._change(new.task_id, decide, watch=[dedupe, other], reads=reads)
            if created is not None:
                return created
        raise StorageRefused(f"the dedupe key {new.dedupe_key!r} is given to other tasks all the time")

    def create_many(self, news: Sequence[NewTask]) -> list[Created]:
        """`create` for each, in batches of one transaction: each task with its job or not at all. Raises TaskConflict,
        with nothing written of its batch and the batches before it accepted."""
        found: list[Created] = []
        for batch in _batches(news):
            # What a batch cannot settle, because tasks of it depend on each other or on a dedupe key in use.
            for new, created in zip(batch, self._create_batch(batch), strict=True):
                found.append(created or self.create(new))
        return found

    def _create_batch(self, batch: Sequence[NewTask]) -> list[Created | None]:
        nonce = secrets.token_hex(8)
        dedupes = [self.keys.dedupe(new.dedupe_key or "-") for new in batch]
        tasks = [self.keys.task(new.task_id) for new in batch]
        reads = [("TIME",), *(("HMGET", task, "status", "nonce", "digest") for task in tasks)]
        reads += [("GET", dedupe) for dedupe in dedupes]

        def decide(replies: list[Any]) -> Decision[list[Created | None]]:
            now = self.clock.server_ms(replies[0])
            outcome: list[Created | None] = []
            free: dict[str, NewTask] = {}
            keys_taken: set[str] = set()
            for new, about, named in zip(batch, replies[1 : len(batch) + 1], replies[len(batch) + 1 :], strict=True):
                status, whose, digest = about
                taken = status is not None and text(whose) != nonce and text(digest) != new.digest()
                if taken or (new.task_id in free and free[new.task_id].digest() != new.digest()):
                    raise TaskConflict(new.task_id)
                if status is not None:
                    outcome.append(Created(new.task_id, existed=text(whose) != nonce))
                elif named is not None or new.task_id in free or new.dedupe_key in keys_taken:
                    outcome.append(None)
                else:
                    outcome.append(Created(new.task_id, existed=False))
                    free[new.task_id] = new
                    keys_taken |= {new.dedupe_key} if new.dedupe_key else set()

            def queue(pipe: Pipeline) -> None:
                for new in free.values():
                    self.writes.new(pipe, new, nonce, now)

            return Write(queue, outcome) if free else Settled(outcome)

        watch = list(dict.fromkeys([*tasks, *dedupes]))
        return transact(self.client, self.clock, watch, reads, decide, patience_s=self.policy.patience_s)

    def cancel(self, task_id: str, by: str) -> Status:
        """End a queued or parked task at once, ask a running one to end. Returns the status it had."""

        def decide(at: Standing, extra: list[Any]) -> Decision[Status]:
            at.require(task_id)
            if at.status.ended and at.status is not Status.CANCELLED:
                raise WrongState(task_id, at.status, "cancelled")
            if at.status is Status.CANCELLED or (at.status is Status.RUNNING and at.cancel is not None):
                return Settled(at.status)

            def queue(pipe: Pipeline) -> None:
                if at.status is Status.RUNNING:
                    pipe.hset(self.keys.control(task_id), "cancel", by)
                    self.writes.tell(pipe, task_id, "cancel-asked", at.now_ms, by=by)
                else:
                    self.writes.dispatcher.drop(pipe, task_id, at.delivery, at.queue)
                    self.writes.leave_line(pipe, task_id, at)
                    self.writes.end(pipe, task_id, Status.CANCELLED, at.now_ms, reason=by)

            return Write(queue, at.status)

        return self._change(task_id, decide)

    def retry(
        self, task_id: str, by: str, *,
        turns_max: int | None = None, tokens_max: int | None = None, deadline_ms: int | None = None,
    ) -> int:  # fmt: skip
        """Queue an ended task again, from its checkpoint, crash counts fresh. `deadline_ms`: from now. Returns the
        delivery."""
        mark = secrets.token_hex(8)

        def decide(at: Standing, extra: list[Any]) -> Decision[int]:
            at.require(task_id)
            if at.retried == mark:
                return Settled(at.delivery)
            if not at.status.ended or at.status is Status.SUCCEEDED:
                raise WrongState(task_id, at.status, "retried")

            def queue(pipe: Pipeline) -> None:
                deadline = None if deadline_ms is None else at.now_ms + deadline_ms
                limits = {"maxTurns": turns_max, "maxTokensTotal": tokens_max, "deadlineMs": deadline}
                self.writes.afresh(pipe, task_id, mark, limits)
                self.writes.queue(pipe, task_id, at.delivery + 1, at.queue, at.now_ms, "retried", by=by)

            return Write(queue, at.delivery + 1)

        return self._change(task_id, decide)

    def wake(self, task_id: str, *, due_only: bool = False) -> bool:
        """Queue a parked task again; `due_only`: only if its time has come. One that waited for its turn at the API
        comes first: those behind it in the queue would draw later places than its own. So does one that waited for a
        place of its key: behind a long queue the place would wait as well."""

        def decide(at: Standing, extra: list[Any]) -> Decision[bool]:
            if at.status is not Status.PARKED or (due_only and float(extra[0] or "inf") > at.now_ms):
                return Settled(False)
            number, front = at.delivery + 1, at.waits_for == "api" or at.waits_for.startswith("slot:")

            def queue(pipe: Pipeline) -> None:
                self.writes.queue(pipe, task_id, number, at.queue, at.now_ms, "woken", at_front=front)

            return Write(queue, True)

        return self._change(task_id, decide, reads=[("ZSCORE", self.keys.index("parked"), task_id)])

    def resolve(self, task_id: str, turn: int, call_id: str, resolution: Resolution, by: str) -> None:
        """A person says what became of a call that holds a parked task, which is queued again."""

        def decide(at: Standing, extra: list[Any]) -> Decision[None]:
            if at.require(task_id).status is not Status.PARKED:
                raise WrongState(task_id, at.status, "resolved")

            def queue(pipe: Pipeline) -> None:
                pipe.hset(self.keys.control(task_id), resolution_field(turn, call_id), resolution.dump())
                told: dict[str, Any] = {"by": by, "turn": turn, "call": call_id, "outcome": resolution.outcome}
                self.writes.queue(pipe, task_id, at.delivery + 1, at.queue, at.now_ms, "resolved", **told)

            return Write(queue, None)

        self._change(task_id, decide)


def _batches(news: Sequence[NewTask]) -> Iterator[list[NewTask]]:
    batch: list[NewTask] = []
    size = 0
    for new in news:
        bytes_ = len(new.text) + len(new.system)
        if batch and (len(batch) == CREATE_BATCH or size + bytes_ > CREATE_BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(new)
        size += bytes_
    if batch:
        yield batch
