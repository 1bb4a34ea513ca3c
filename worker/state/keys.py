"""Every Redis key Baton writes: one function per key, with type, meaning, writer and lifetime.

All keys of a task live until it ends; then they all get the same expiry (the retention time) in the same
EXEC that ends it. Only the lock has a ttl while the task lives. RQ's own keys are not here: `worker.dispatch`
has them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """Key names under one prefix."""

    prefix: str = "baton"

    def _of(self, task_id: str, part: str = "") -> str:
        return f"{self.prefix}:task:{task_id}{part}"

    def task(self, task_id: str) -> str:
        """hash: what was asked (written once by create) and where it stands (written by every verb)."""
        return self._of(task_id)

    def checkpoint(self, task_id: str) -> str:
        """hash: version, seq, commit, turns, tokensUsed, totalTokens, pendingToolUse, messageCount, stopReason,
        serverRunId; written by the holder only."""
        return self._of(task_id, ":checkpoint")

    def messages(self, task_id: str) -> str:
        """list: one JSON document per message, append-only; written by the holder only."""
        return self._of(task_id, ":messages")

    def ledger(self, task_id: str) -> str:
        """hash: `turn:tool_use_id` → what the call returned; written by the holder after the call ran."""
        return self._of(task_id, ":ledger")

    def started(self, task_id: str) -> str:
        """hash: `turn:tool_use_id` → start marker, written by the holder just before the call runs; and `lapsed:epoch`
        for an ownership that recover took away on the lease's lapse alone, its process not proven dead."""
        return self._of(task_id, ":started")

    def lock(self, task_id: str) -> str:
        """string: the holder's fence; never without a ttl; written by claim and renew."""
        return self._of(task_id, ":lock")

    def epoch(self, task_id: str) -> str:
        """string: `n:token` of the ownership, `n:` when revoked; n only grows; written by every verb that gives
        or takes ownership."""
        return self._of(task_id, ":epoch")

    def control(self, task_id: str) -> str:
        """hash: what people asked for (cancel, resolutions); written by operators' verbs."""
        return self._of(task_id, ":control")

    def events(self, task_id: str) -> str:
        """stream: progress of the task, capped; written in the EXEC of the change it tells of."""
        return self._of(task_id, ":events")

    def of_task(self, task_id: str) -> tuple[str, ...]:
        """All keys of one task but the lock, which ends with the ownership."""
        parts = ("", ":checkpoint", ":messages", ":ledger", ":started", ":epoch", ":control", ":events")
        return tuple(self._of(task_id, part) for part in parts)

    def index(self, name: str) -> str:
        """zset `queued`, `running`, `parked` or `finished`: task id → the time that matters, in ms of the server's
        clock (delivery, lease deadline, wake-up, end); moved in the EXEC of the change. No ttl: an index."""
        return f"{self.prefix}:{name}"

    def missing(self) -> str:
        """zset: `task:delivery` → when a sweep first missed it on its RQ list, ms; written by sweepers only."""
        return f"{self.prefix}:missing"

    def slots(self, key: str) -> str:
        """set: ids of the running tasks that hold a place of a concurrency key; written in the EXEC that gives or ends
        the ownership, by sweepers for tasks that vanished. No ttl: gone with its last member."""
        return f"{self.prefix}:slots:{key}"

    def slots_waiting(self, key: str) -> str:
        """zset: task id → when it first wanted a place of the key, ms; written by claim and cancel, and by sweepers. No
        ttl: gone with its last member."""
        return f"{self.prefix}:slots-waiting:{key}"

    def slots_wanted(self) -> str:
        """set: concurrency keys that tasks may be waiting for; written by claim and by sweepers. No ttl: an index."""
        return f"{self.prefix}:slots-wanted"

    def budget(self, scope: str) -> str:
        """hash: limit, periodMs, born, `reserved:{born}` and `used:{window}` of a budget, in tokens; written by people,
        and in the commits that reserve and settle. Lives until a person clears it."""
        return f"{self.prefix}:budget:{scope}"

    def budgets(self) -> str:
        """set: scopes that have a budget; written by people. No ttl: an index."""
        return f"{self.prefix}:budgets"

    def budget_waiting(self) -> str:
        """zset: task id → since when it waits for a budget, ms (which one says its `waitsFor`); written by park, and by
        those who look through it. No ttl: an index."""
        return f"{self.prefix}:budget-waiting"

    def dedupe(self, key: str) -> str:
        """string: id of the task that was accepted under a dedupe key; ttl = retention time; written by create."""
        return f"{self.prefix}:dedupe:{key}"

    def api(self, digest: str) -> str:
        """hash: until when an API asked all of us to wait, and how we come back after that; written by who was told.
        Ends by itself, soon after everybody may ask again."""
        return f"{self.prefix}:api:{digest}"

    def api_places(self, digest: str) -> str:
        """string: how many have drawn a place in the line behind an `api` record; written by them. Begins and ends
        with the record, and is not part of it, so that those who draw do not disturb who writes it under WATCH."""
        return f"{self.prefix}:api:{digest}:places"

    def apis(self) -> str:
        """zset: digest of each `api` record → when it ends, ms; written with it. Ends 31 days after the last one."""
        return f"{self.prefix}:apis"

    def quiet(self) -> str:
        """set: names of RQ workers that are to take no more tasks; written by `baton workers`, which also takes out
        those that are gone, and by a worker that begins or ends. No ttl."""
        return f"{self.prefix}:quiet"

    def counters(self) -> str:
        """hash: fleet totals since the beginning. No ttl."""
        return f"{self.prefix}:counters"

    def feed(self) -> str:
        """stream: what happened in the fleet, capped, without task text. No ttl."""
        return f"{self.prefix}:feed"


INDEXES = ("queued", "running", "parked", "finished")


def resolution_field(turn: int, call_id: str) -> str:
    """Field of a person's word about a call, in `control`."""
    return f"resolve:{turn}:{call_id}"


def lapsed_field(epoch: int) -> str:
    """Field of a lapsed ownership in `started`."""
    return f"lapsed:{epoch}"


def call_field(turn: int, call_id: str) -> str:
    """Field of a call in the ledger and in `started`. The turn is part of it: models do reuse ids."""
    return f"{turn}:{call_id}"
