"""Places: at most so many tasks with one concurrency key are running, in the whole fleet.

A running task holds a place from the EXEC that makes it running to the one that ends that; these are the writes of
`owned` and `revoke`, so no verb can forget it. A task that finds all places taken is parked, in line by the moment it
first wanted one. Whoever frees a place wakes the first in line after its EXEC; should it die just then, a sweeper does.

RQ 3's own rate limit (rq/rate_limit.py) limits jobs, and ours are only wake-ups: a lost or doubled one would leak or
double a place, a place freed at the end of a job knows nothing of fences, and a task could hand over, park or be
recovered only outside of the EXEC that moves its place.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from worker.errors import BatonError, TaskFault
from worker.state.asked import Asked
from worker.state.codec import encode
from worker.state.lease import Holder, epoch_number, new_token
from worker.state.standing import Refused, Standing, number, refusal, text
from worker.state.task import Status, too_late
from worker.state.transact import Decision, Settled, Write, queued, transact

LOOK_MS = 3_600_000  # who waits in line looks for itself now and then, should nobody have offered it a place
UNCLAIMED_MS = 60_000  # who was woken for a place (or a budget) and does not come for so long keeps nobody else from it
OFFERED_MAX = 100  # places offered at once
KEYS_MAX = 100  # in one sweep


@dataclass(frozen=True)
class Line:
    """Where a task stands in the line of its key: since when."""

    key: str
    since_ms: int


class Slots(Asked):
    """The verb `claim`, and the offering of places."""

    def claim(self, task_id: str, delivery: int, owner: dict[str, Any]) -> Holder | Refused:
        """Take ownership for this delivery. `owner` is JSON for people and for the proof that its process is gone."""
        token, sent_at = new_token(), self.clock.monotonic()
        line: Line | None = None  # known once the task has been read; one without a key is not asked about places

        def decide(at: Standing, extra: list[Any]) -> Decision[Holder | Refused | Line]:
            if at.fence.endswith(f":{token}"):
                return Settled(self._holder(task_id, at.fence, delivery, at.attempts))
            if refused := refusal(at, delivery):
                return Settled(refused)
            if at.deadline_ms is not None and at.now_ms >= at.deadline_ms:
                return self._expired(task_id, at, f"limit: {too_late(at.deadline_ms)}")
            if at.concurrency_key and line is None:
                return Settled(Line(at.concurrency_key, at.slot_since_ms or at.now_ms))
            if line is not None and extra[0] + extra[1] >= at.concurrency:
                return self._lined_up(task_id, at, line.since_ms)
            fence, ttl = f"{epoch_number(at.fence) + 1}:{token}", self.policy.lease_ttl_ms
            holder = self._holder(task_id, fence, delivery, at.attempts + 1)
            return Write(lambda pipe: self.writes.owned(pipe, task_id, fence, ttl, at, encode(owner)), holder)

        lock = self.keys.lock(task_id)
        claimed = self._change(task_id, decide, watch=[lock])
        if isinstance(claimed, Line):
            line = claimed
            slots, waiting = self.keys.slots(line.key), self.keys.slots_waiting(line.key)
            reads = [("SCARD", slots), ("ZCOUNT", waiting, "-inf", f"({line.since_ms}")]  # taken, and ahead of us
            claimed = self._change(task_id, decide, watch=[lock, slots], reads=reads)
        assert not isinstance(claimed, Line)  # a task keeps its key
        if isinstance(claimed, Holder):
            claimed.confirm(sent_at)
        return claimed

    def _expired(self, task_id: str, at: Standing, why: str) -> Write[Holder | Refused | Line]:
        def queue(pipe: redis.client.Pipeline) -> None:
            self.writes.leave_line(pipe, task_id, at)
            self.writes.end(pipe, task_id, Status.FAILED, at.now_ms, reason=why, error=why)

        return Write(queue, Refused(why, Status.FAILED, at.queue, ended=True))

    def _lined_up(self, task_id: str, at: Standing, since: int) -> Write[Holder | Refused | Line]:
        wake_at = at.now_ms + random.randint(LOOK_MS // 2, LOOK_MS)  # a long line does not look all at once
        why = f"all {at.concurrency} places of {at.concurrency_key} are taken"
        return Write(
            lambda pipe: self.writes.line_up(pipe, task_id, at, since, wake_at), Refused(why, Status.PARKED, at.queue)
        )  # fmt: skip

    # -- offering what is free -------------------------------------------------------------------------------------

    def offer_places(self) -> list[str]:
        """For sweepers: wake those whose turn it is, of keys that somebody waits for (other ones each time, if there
        are very many). Takes their places from tasks that do not run. Returns the tasks woken."""
        client: Any = self.client
        woken: list[str] = []
        for raw in client.srandmember(self.keys.slots_wanted(), KEYS_MAX):
            self._drop_gone(key := text(raw))
            woken += self._offer(key)
            self._forget(key)
        return woken

    def _freed(self, concurrency_key: str) -> None:
        # The change itself is done; should this fail, a sweeper wakes them.
        if concurrency_key:
            with contextlib.suppress(BatonError, redis.RedisError, OSError):
                self._offer(concurrency_key)

    def _offer(self, key: str) -> list[str]:
        """Wake as many of those first in line as there are free places. One that was woken before, and has not come
        yet, counts as well, for a while."""
        client: Any = self.client
        waiting = self.keys.slots_waiting(key)
        with client.pipeline(transaction=False) as pipe:
            pipe.zrange(waiting, 0, OFFERED_MAX - 1)
            pipe.scard(self.keys.slots(key)).time()
            members, taken, time = pipe.execute()
        first, now = [text(member) for member in members], self.clock.server_ms(time)
        offered, leave = list[str](), list[str]()
        for task_id, (status, places, changed) in zip(first, self._of_each(first), strict=True):
            woken_before = text(status) == Status.QUEUED and now - number(changed) < UNCLAIMED_MS
            if text(status) != Status.PARKED and not woken_before:
                leave.append(task_id)
                continue
            if 0 < number(places) <= taken:  # 0: damaged, which its waking will tell
                break
            taken += 1
            offered += [] if woken_before else [task_id]
        # Each goes to the front of its queue: the first in line last, so that it comes first.
        woken = [task_id for task_id in reversed(offered) if self._wake_in_line(task_id, waiting)]
        self._strike_off(waiting, leave, "slot:")  # one that comes after all takes its old place in the line again
        return woken[::-1]

    def _wake_in_line(self, task_id: str, waiting: str) -> bool:
        try:
            return self.wake(task_id)
        except TaskFault:  # a damaged one keeps nobody else from the place
            self.client.zrem(waiting, task_id)
            return False

    def _of_each(self, ids: Sequence[str]) -> list[Any]:
        with self.client.pipeline(transaction=False) as pipe:
            for task_id in ids:
                pipe.hmget(self.keys.task(task_id), "status", "concurrency", "changedAtMs")
            found = pipe.execute(raise_on_error=False)
        return [(None, None, None) if isinstance(one, Exception) else one for one in found]

    def _strike_off(self, listed: str, ids: Sequence[str], waits_for: str) -> None:
        """Take those off the list that are not parked for that any more. Under WATCH: one that is parked again in
        this moment must stay."""

        def decide(replies: list[Any]) -> Decision[None]:
            over = [task_id for task_id, found in zip(ids, replies, strict=True) if not waits(found, waits_for)]
            return Write(queued("zrem", listed, *over), None) if over else Settled(None)

        if ids:
            tasks = [self.keys.task(task_id) for task_id in ids]
            reads = [("HMGET", task, "status", "waitsFor") for task in tasks]
            transact(
                self.client, self.clock, tasks, reads, decide, patience_s=self.policy.patience_s, optional=len(reads)
            )  # fmt: skip

    def _drop_gone(self, key: str) -> None:
        """Members that do not run hold no place: their task has vanished, or an older Baton took it away."""
        slots, running = self.keys.slots(key), self.keys.index("running")
        client: Any = self.client
        members = [text(member) for member in client.smembers(slots)]

        def decide(replies: list[Any]) -> Decision[None]:
            gone = [member for member, score, there in zip(members, *replies, strict=True) if there and score is None]
            # A place is taken and given back together with the status, so under WATCH this is no matter of timing.
            return Write(queued("srem", slots, *gone), None) if gone else Settled(None)

        if members:
            reads = [("ZMSCORE", running, *members), ("SMISMEMBER", slots, *members)]
            transact(self.client, self.clock, [slots], reads, decide, patience_s=self.policy.patience_s)

    def _forget(self, key: str) -> None:
        waiting, wanted = self.keys.slots_waiting(key), self.keys.slots_wanted()

        def decide(replies: list[Any]) -> Decision[None]:
            return Settled(None) if replies[0] else Write(queued("srem", wanted, key), None)

        transact(
            self.client, self.clock, [waiting], [("EXISTS", waiting)], decide, patience_s=self.policy.patience_s
        )  # fmt: skip


def waits(found: Any, waits_for: str, status: Status = Status.PARKED) -> bool:
    """`found`: a task's status, `waitsFor`, and whatever else was read, or what Redis says of a key that is no task."""
    if isinstance(found, Exception):
        return False
    return text(found[0]) == status and text(found[1]).startswith(waits_for)
