"""The three guards every change of a task goes through, and the numbers they go by.

`_change`: by somebody who holds nothing; bound to the state the verb starts from, seen under WATCH.
`_commit`: by the holder; bound to its fence and to the `seq` it last wrote.
`_release`: by the holder, ending its ownership; bound to its fence.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
from redis.client import Pipeline

from worker.clock import Clock, SystemClock
from worker.errors import CancelRequested
from worker.state.budget import Budget, Open, Purse, read_budgets
from worker.state.keys import Keys
from worker.state.lease import Holder
from worker.state.server import InfoProbe, ServerProbe, require_fit
from worker.state.standing import Standing, read_standing, standing_reads, text
from worker.state.transact import Decision, Settled, Write, patiently, transact
from worker.state.writes import Dispatcher, Writes

T = TypeVar("T")
Commands = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Policy:
    """The numbers of the protocol. `patience_s`: how long a verb waits for Redis to answer or to store."""

    lease_ttl_ms: int = 15_000
    lease_margin_ms: int = 2_000
    crashes_in_row_max: int = 3
    crashes_max: int = 20
    retention_s: int = 7 * 86_400
    holder_patience_s: float = 60
    patience_s: float = 2


class Guards:
    """Bound to one Redis client. Threads may share it; a fork may not."""

    def __init__(
        self, client: redis.Redis, dispatcher: Dispatcher, *,
        keys: Keys | None = None, policy: Policy | None = None,
        clock: Clock | None = None, probe: ServerProbe | None = None,
    ) -> None:  # fmt: skip
        self.client = client
        self.keys = keys or Keys()
        self.policy = policy or Policy()
        self.clock = clock or SystemClock()
        self.probe = probe or InfoProbe()
        self.writes = Writes(self.keys, dispatcher, self.policy.retention_s)
        self.purse = Purse(self.keys)

    def require_fit(self, *, force: bool = False) -> None:
        """Raises ServerUnfit if this server would lose tasks; `force` allows one that may evict keys."""
        require_fit(self._patiently(lambda: self.probe.unfit(self.client)), force=force)

    def promise(self) -> str:
        """What the server keeps of what it has acknowledged, in words."""
        return self._patiently(lambda: self.probe.promise(self.client))

    def _patiently(self, ask: Callable[[], T]) -> T:
        return patiently(ask, self.clock, patience_s=self.policy.patience_s)

    def _change(
        self, task_id: str, decide: Callable[[Standing, list[Any]], Decision[T]], *,
        watch: Sequence[str] = (), reads: Commands = (),
    ) -> T:  # fmt: skip
        """`decide` gets where the task stands and the answers to `reads`. The outcome of a change whose reply was
        lost is the same as without the loss, as long as nobody has changed the task again before the second look."""
        commands = [*standing_reads(self.keys, task_id), *reads]
        known = len(commands) - len(reads)
        own = (self.keys.task(task_id), self.keys.epoch(task_id), self.keys.control(task_id))

        change = secrets.token_hex(8)
        tried: list[Write[T]] = []

        def decide_on(replies: list[Any]) -> Decision[T]:
            at = read_standing(replies[:known], self.clock)
            if at.change == change:
                return Settled(tried[-1].value)
            decision = decide(at, replies[known:])
            if isinstance(decision, Settled):
                return decision
            tried.append(decision)

            def queue(pipe: Pipeline) -> None:
                pipe.hset(self.keys.task(task_id), "change", change)
                decision.queue(pipe)

            return Write(queue, decision.value)

        return transact(self.client, self.clock, [*own, *watch], commands, decide_on, patience_s=self.policy.patience_s)

    def _commit(
        self, holder: Holder, queue: Callable[[Pipeline, int, list[Any]], None], *,
        reads: Commands = (), heard: Callable[[list[Any]], None] | None = None,
    ) -> None:  # fmt: skip
        """`queue` gets the pipe, the server's time in ms and the answers to `reads`; `heard` EXEC's answers, unless
        they were lost. Raises LeaseLost."""
        checkpoint, epoch = self.keys.checkpoint(holder.task_id), self.keys.epoch(holder.task_id)
        with holder.writing:
            number = holder.seq + 1
            # Unlike `number` never used again: after a commit whose outcome stayed unknown, the next one must not
            # take that one's stamp for its own and believe itself stored.
            stamp = f"{holder.fence}:{number}:{secrets.token_hex(4)}"

            def decide(replies: list[Any]) -> Decision[None]:
                fence, (seq, commit), cancel, time, *rest = replies
                if text(commit) == stamp:
                    return Settled(None)  # applied before, only the answer was lost
                self._require_fence(holder, text(fence))
                if int(seq or 0) != holder.seq:
                    what = f"the checkpoint is at seq {text(seq) or 0}, this holder left it at {holder.seq}"
                    # Behind: acknowledged and forgotten. Ahead: a commit of ours whose outcome we never learned.
                    forgotten = "Redis has forgotten what it acknowledged: " if int(seq or 0) < holder.seq else ""
                    raise holder.lose(forgotten + what)
                if cancel is not None:
                    holder.ask_to_cancel(text(cancel))
                now = self.clock.server_ms(time)

                def queue_all(pipe: Pipeline) -> None:
                    queue(pipe, now, rest)
                    pipe.hset(checkpoint, mapping={"seq": number, "commit": stamp})

                return Write(queue_all, None, heard)

            own: Commands = [
                ("GET", epoch),
                ("HMGET", checkpoint, "seq", "commit"),
                ("HGET", self.keys.control(holder.task_id), "cancel"),
                ("TIME",),
            ]
            self._transact_as(holder, [epoch, checkpoint], [*own, *reads], decide)
            holder.seq, holder.progressed_at = number, self.clock.monotonic()

    def _release(self, holder: Holder, queue: Callable[[Pipeline, Standing], None], *, even_if_cancelled: bool) -> None:
        """End the ownership. A cancel that nobody has acted on yet comes first: raises CancelRequested."""
        reads = standing_reads(self.keys, holder.task_id)
        own = (self.keys.task(holder.task_id), self.keys.epoch(holder.task_id), self.keys.control(holder.task_id))
        scopes, known = tuple(holder.open.scopes) if holder.open else (), len(reads)
        place = ""

        def decide(replies: list[Any]) -> Decision[Open | None]:
            nonlocal place
            at = read_standing(replies[:known], self.clock)
            place = at.concurrency_key
            if at.released == holder.fence:
                return Settled(None)
            self._require_fence(holder, at.fence)
            if at.cancel is not None and not even_if_cancelled:
                raise CancelRequested(at.cancel)
            open_ = Open.load(at.budget_open)
            if open_ is not None and not set(open_.scopes) <= set(scopes):
                return Settled(open_)  # Redis has forgotten that it was settled

            def queue_all(pipe: Pipeline) -> None:
                self.writes.revoke(pipe, holder.task_id, holder.epoch, at)
                pipe.hset(self.keys.task(holder.task_id), "released", holder.fence)
                if open_ is not None:
                    self._settle(pipe, holder, open_, read_budgets(scopes, replies[known:], at.now_ms))
                queue(pipe, at)

            return Write(queue_all, None)

        with holder.writing:
            while unknown := self._transact_as(holder, own, [*reads, *self.purse.reads(scopes)], decide):
                scopes = tuple(unknown.scopes)  # nobody else changes it
            holder.released = True
            holder.lose("released")
        self._freed(place)

    def _settle(self, pipe: Pipeline, holder: Holder, open_: Open, budgets: Mapping[str, Budget]) -> None:
        """What was reserved and not used goes back; unless the call has begun: now, in a process that is gone, or
        before Redis forgot that it had been settled."""
        begun = holder.calling or open_.epoch != holder.epoch or holder.open is None
        self.purse.close(pipe, holder.task_id, open_, budgets, open_.amount if begun else 0)

    def _freed(self, concurrency_key: str) -> None:
        """A task with this key has just stopped running."""

    def _holder(self, task_id: str, fence: str, delivery: int, attempt: int) -> Holder:
        ttl_s, margin_s = self.policy.lease_ttl_ms / 1000, self.policy.lease_margin_ms / 1000
        return Holder(task_id, fence, delivery, attempt, self.clock, ttl_s, margin_s)

    def _transact_as(
        self, holder: Holder, watch: Sequence[str], reads: Commands, decide: Callable[[list[Any]], Decision[T]]
    ) -> T:
        return transact(
            self.client, self.clock, watch, reads, decide,
            patience_s=self.policy.holder_patience_s, before_each=holder.check,
        )  # fmt: skip

    def _get(self, key: str) -> bytes | None:
        """A plain read, with the same patience as a change."""

        def decide(replies: list[Any]) -> Decision[bytes | None]:
            return Settled(replies[0])

        return transact(self.client, self.clock, [key], [("GET", key)], decide, patience_s=self.policy.patience_s)

    def _require_fence(self, holder: Holder, fence: str) -> None:
        if fence != holder.fence:
            raise holder.lose(f"the fence is {fence or 'gone'} now")
