"""Renewing leases, of one holder or of many at once.

Bound to the fence, like a commit; moves no `seq`, so that it never conflicts with one. Many are renewed in one WATCH,
one read and one MULTI: one that is lost is left out of it, and one that cannot be renewed together with the others is
renewed alone, so that nobody's trouble is another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.client import Pipeline

from worker.errors import LeaseLost, StorageRefused
from worker.state.guards import Commands, Guards
from worker.state.lease import Holder
from worker.state.standing import text
from worker.state.transact import Decision, Settled, Write, transact

BATCH_MAX = 100
TRIES_TOGETHER = 4  # each that fails means that one of the batch was let go of meanwhile


class Renewal(Guards):
    """The verbs `renew` and `renew_all`."""

    def renew(self, holder: Holder) -> None:
        """Prolong the lease, and learn of a cancel. Raises LeaseLost."""
        try:
            self._renew(holder, with_index=True)
        except StorageRefused:  # a full server still grants PEXPIRE, and the lock is what counts
            self._renew(holder, with_index=False)

    def renew_all(self, holders: Sequence[Holder]) -> list[LeaseLost | StorageRefused | None]:
        """`renew` for each, in a few round trips for all: what it would have raised, in their order. Raises
        RedisUnavailable; those renewed until then are."""
        found: list[LeaseLost | StorageRefused | None] = []
        for start in range(0, len(holders), BATCH_MAX):
            batch = holders[start : start + BATCH_MAX]
            try:
                found += self._together(batch)
            except (_TooMany, StorageRefused):
                found += map(self._alone, batch)
        return found

    def _together(self, batch: Sequence[Holder]) -> list[LeaseLost | None]:
        try:
            return self._renew_batch(batch, with_index=True, tries=TRIES_TOGETHER)
        except StorageRefused:  # as in `renew`
            return self._renew_batch(batch, with_index=False, tries=TRIES_TOGETHER)

    def _alone(self, holder: Holder) -> LeaseLost | StorageRefused | None:
        try:
            self.renew(holder)
        except (LeaseLost, StorageRefused) as error:
            return error
        return None

    def _renew(self, holder: Holder, *, with_index: bool) -> None:
        (lost,) = self._renew_batch([holder], with_index=with_index)
        if lost is not None:
            raise lost

    def _renew_batch(
        self, holders: Sequence[Holder], *, with_index: bool, tries: int | None = None
    ) -> list[LeaseLost | None]:
        """Raises _TooMany after so many `tries`."""
        attempt = _Attempt(self, holders, with_index, tries)
        asked = self.probe.connection_commands
        reads: Commands = [
            ("MGET", *(self.keys.epoch(one.task_id) for one in holders)),
            ("MGET", *(self.keys.lock(one.task_id) for one in holders)),
            *(("HGET", self.keys.control(one.task_id), "cancel") for one in holders),
            ("TIME",),
            *asked,
        ]
        # The locks are watched here, and only here: one that lapses before the EXEC must be set, not prolonged.
        watch = [key(one.task_id) for one in holders for key in (self.keys.epoch, self.keys.lock)]
        with suppress(_Nobody):
            transact(
                self.client, self.clock, watch, reads, attempt.decide,
                patience_s=0, before_each=attempt.begin, optional=len(asked),
            )  # fmt: skip
            attempt.confirm()
        return attempt.lost


class _TooMany(redis.RedisError):
    """The tasks of this batch change too fast to be renewed together."""


class _Nobody(Exception):
    """All of this batch are lost, without a look at Redis."""


class _Attempt:
    """One renewal of a batch: who is lost, who is kept, and by which connection."""

    def __init__(self, store: Guards, holders: Sequence[Holder], with_index: bool, tries: int | None) -> None:
        self.store = store
        self.holders = holders
        self.with_index = with_index
        self.tries = tries
        self.sent_at = store.clock.monotonic()
        self.lost: list[LeaseLost | None] = [None] * len(holders)
        self.kept: list[tuple[Holder, bool]] = []  # and whether its lock is still there
        self.connection = ""

    def begin(self) -> None:
        """Before each try: a holder that was out of touch for too long is lost by its own clock."""
        if self.tries is not None:
            if self.tries == 0:
                raise _TooMany
            self.tries -= 1
        for number, holder in enumerate(self.holders):
            try:
                holder.check()
            except LeaseLost as lost:
                self.lost[number] = lost
        if all(self.lost):
            raise _Nobody

    def decide(self, replies: list[Any]) -> Decision[None]:
        many = len(self.holders)
        epochs, locks, cancels = replies[0], replies[1], replies[2 : 2 + many]
        time, *connection = replies[2 + many :]
        self.connection = self.store.probe.connection(connection)
        self.kept = []
        for number, holder in enumerate(self.holders):
            if self.lost[number] is None:
                self.lost[number] = self._lost(holder, text(epochs[number]))
            if self.lost[number] is not None:
                continue
            if cancels[number] is not None:
                holder.ask_to_cancel(text(cancels[number]))
            self.kept.append((holder, locks[number] is not None))
        if not self.kept:
            return Settled(None)
        deadline = self.store.clock.server_ms(time) + self.store.policy.lease_ttl_ms
        return Write(lambda pipe: self._queue(pipe, deadline), None)

    def _lost(self, holder: Holder, fence: str) -> LeaseLost | None:
        try:
            self.store._require_fence(holder, fence)
        except LeaseLost as lost:
            return lost
        return None

    def _queue(self, pipe: Pipeline, deadline: int) -> None:
        keys, ttl = self.store.keys, self.store.policy.lease_ttl_ms
        for holder, locked in self.kept:
            if locked:
                pipe.pexpire(keys.lock(holder.task_id), ttl)
            else:  # lapsed or evicted, and nobody has taken the task: it is still ours
                pipe.set(keys.lock(holder.task_id), holder.fence, px=ttl)
            if self._beat(holder) != holder.beat:
                if self.with_index:
                    pipe.hset(keys.task(holder.task_id), "beat", self._beat(holder))
                else:  # a full server still forgets: better no number than an old one
                    pipe.hdel(keys.task(holder.task_id), "beat")
        if self.with_index:
            pipe.zadd(keys.index("running"), {holder.task_id: deadline for holder, _ in self.kept})

    def confirm(self) -> None:
        """It is stored."""
        for holder, _ in self.kept:
            if self.with_index or self._beat(holder) != holder.beat:
                holder.beat = self._beat(holder) if self.with_index else ""
            holder.confirm(self.sent_at)

    def _beat(self, holder: Holder) -> str:
        return f"{holder.epoch}:{self.connection}" if self.connection else ""
