"""The verbs of clients and operators; `worker.state.store` has the table of all verbs, and the others."""

from __future__ import annotations

import secrets
from typing import Any

from redis.client import Pipeline

from worker.errors import StorageRefused, TaskConflict, WrongState
from worker.state.guards import Guards
from worker.state.keys import resolution_field
from worker.state.ledger import Resolution
from worker.state.standing import Standing, text
from worker.state.task import Created, NewTask, Status
from worker.state.transact import CONFLICTS_MAX, Decision, Settled, Write

# A dedupe key answers with its task as long as that is one of these; a task that went wrong may be asked again.
DEDUPES = frozenset({Status.QUEUED, Status.RUNNING, Status.PARKED, Status.SUCCEEDED})


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
                    self.writes.end(pipe, task_id, Status.CANCELLED, at.now_ms, reason=by)

            return Write(queue, at.status)

        return self._change(task_id, decide)

    def retry(self, task_id: str, by: str, *, turns_max: int | None = None, tokens_max: int | None = None) -> int:
        """Queue an ended task again, from its checkpoint, crash counts fresh. Returns the delivery."""
        mark = secrets.token_hex(8)

        def decide(at: Standing, extra: list[Any]) -> Decision[int]:
            at.require(task_id)
            if at.retried == mark:
                return Settled(at.delivery)
            if not at.status.ended or at.status is Status.SUCCEEDED:
                raise WrongState(task_id, at.status, "retried")

            def queue(pipe: Pipeline) -> None:
                self.writes.afresh(pipe, task_id, mark, {"maxTurns": turns_max, "maxTokensTotal": tokens_max})
                self.writes.queue(pipe, task_id, at.delivery + 1, at.queue, at.now_ms, "retried", by=by)

            return Write(queue, at.delivery + 1)

        return self._change(task_id, decide)

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
