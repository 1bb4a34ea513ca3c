"""Budgets: how many tokens a scope (`fleet`, `tag=NAME`) may use in all, or in each period.

A model call's estimated tokens are reserved before it starts, and settled when its usage is known, each in the commit
that saves the conversation at that point (`Purse`: the writes). What is reserved stands on the task's own hash
(`budgetOpen`) and in the budget's `reserved`, so that whoever ends a dead holder's ownership can charge it: that answer
may have to be paid for. A charge counts in the period in which it is made. The verbs are in `worker.state.budgeted`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redis.client import Pipeline

from worker.state.codec import decode, encode
from worker.state.keys import Keys

FLEET = "fleet"
WAITS = "budget:"  # begins the `waitsFor` of a task that waits for one


def scopes_of(tags: Iterable[str]) -> tuple[str, ...]:
    """Every scope that a task with these tags is in."""
    return (FLEET, *(f"tag={tag}" for tag in tags))


@dataclass(frozen=True)
class Open:
    """Tokens reserved for the model call after `turn` turns, by the holder of `epoch`. `scopes`: each with the `born`
    of the budget that they were reserved in."""

    amount: int
    epoch: int
    turn: int
    scopes: dict[str, str]
    id: str = ""

    @classmethod
    def new(cls, amount: int, epoch: int, turn: int, budgets: Sequence[Budget]) -> Open:
        return cls(amount, epoch, turn, {one.scope: one.born for one in budgets}, secrets.token_hex(4))

    def dump(self) -> bytes:
        return encode(asdict(self))

    @classmethod
    def load(cls, raw: str | bytes | None) -> Open | None:
        """None where nothing is reserved; nor can anything be done about what cannot be read."""
        try:
            return cls(**decode(raw if isinstance(raw, bytes) else (raw or "").encode())) if raw else None
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True)
class Budget:
    """One budget at one moment. `used`: in the period that began with `window`; `period_ms` 0: in all. `born`: changes
    when it is made anew, so that what was reserved in an older one is not taken from it. `old`: fields of periods that
    are over."""

    scope: str
    limit: int
    period_ms: int
    born: str
    used: int
    reserved: int
    window: int
    old: tuple[str, ...] = ()

    @property
    def left(self) -> int:
        return self.limit - self.used - self.reserved

    @property
    def field(self) -> str:
        return f"used:{self.window}"

    @property
    def anew_ms(self) -> int | None:
        """When it begins anew; None: never."""
        return (self.window + 1) * self.period_ms if self.period_ms else None


def reserved_field(born: str) -> str:
    """Nobody watches a budget, so it may be made anew between a look at it and the EXEC: what was reserved in the
    older one must not be counted in this one."""
    return f"reserved:{born}"


def read_budget(scope: str, reply: Any, now_ms: int) -> Budget | None:
    """From HGETALL's answer, in either protocol; None if there is no such budget."""
    raw = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    if b"limit" not in raw:
        return None
    period, born = int(raw.get(b"periodMs") or 0), raw.get(b"born", b"").decode()
    window = now_ms // period if period else 0
    current = f"used:{window}"
    old = tuple(name.decode() for name in raw if name.startswith(b"used:") and name.decode() != current)
    return Budget(
        scope, int(raw[b"limit"]), period, born,
        int(raw.get(current.encode()) or 0), max(int(raw.get(reserved_field(born).encode()) or 0), 0), window, old,
    )  # fmt: skip


def read_budgets(scopes: Sequence[str], replies: Sequence[Any], now_ms: int) -> dict[str, Budget]:
    """The answers to `Purse.reads`; scopes without a budget are left out."""
    found = (read_budget(scope, reply, now_ms) for scope, reply in zip(scopes, replies, strict=True))
    return {one.scope: one for one in found if one is not None}


@dataclass(frozen=True)
class Purse:
    """Reads and writes of budgets, queued into a verb's MULTI."""

    keys: Keys

    def reads(self, scopes: Sequence[str]) -> list[tuple[str, ...]]:
        return [("HGETALL", self.keys.budget(scope)) for scope in scopes]

    def reserve(self, pipe: Pipeline, task_id: str, amount: Open, budgets: Iterable[Budget]) -> None:
        """Queues two commands for each budget; the second one's answer is [reserved, used] after it, for `held`."""
        for one in budgets:
            key = self.keys.budget(one.scope)
            pipe.hincrby(key, reserved_field(one.born), amount.amount)
            pipe.hmget(key, [reserved_field(one.born), one.field])
        pipe.hset(self.keys.task(task_id), "budgetOpen", amount.dump())

    def close(
        self, pipe: Pipeline, task_id: str, open_: Open, budgets: Mapping[str, Budget], charge: int
    ) -> None:  # fmt: skip
        """Give back what was reserved, and count `charge` as used."""
        for scope, born in open_.scopes.items():
            one = budgets.get(scope)
            if one is None:
                continue  # it was cleared meanwhile
            key = self.keys.budget(scope)
            if one.born == born:
                pipe.hincrby(key, reserved_field(born), -open_.amount)
            if charge:
                pipe.hincrby(key, one.field, charge)
            if one.old:
                pipe.hdel(key, *one.old)
        pipe.hset(self.keys.task(task_id), "budgetOpen", "")


def held(budgets: Sequence[Budget], replies: Sequence[Any]) -> bool:
    """Whether what `Purse.reserve` reserved has kept every budget within its limit, by the answers to its commands."""
    totals = replies[1 : 2 * len(budgets) : 2]
    return all(sum(int(n or 0) for n in total) <= one.limit for one, total in zip(budgets, totals, strict=True))
