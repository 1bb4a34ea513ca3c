"""A connection to a real server that fails once, at a chosen message, in a chosen way.

A message is what goes to the server in one piece: WATCH, the reads, MULTI…EXEC, UNWATCH. The fault is made where
redis-py sees it, on the connection, so everything above (retries, WatchError, pool) is the real thing. A `Fault` is
one that its victim gets over by asking again, a `Blow` one that ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.exceptions import (
    BusyLoadingError,
    ExecAbortError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.retry import Retry


class Fault(StrEnum):
    UNSENT = "dies before sending"
    LOST = "reply lost"
    OOM = "OOM"
    MISCONF = "MISCONF"
    READONLY = "READONLY"
    LOADING = "LOADING"

    @property
    def error(self) -> redis.RedisError | None:
        """What redis-py makes of the server's answer; None where there is none."""
        return {
            Fault.OOM: OutOfMemoryError("command not allowed when used memory > 'maxmemory'.", status_code="OOM"),
            Fault.MISCONF: ResponseError("MISCONF Valkey is configured to save RDB snapshots, but it's unable to"),
            Fault.READONLY: ReadOnlyError("You can't write against a read only replica.", status_code="READONLY"),
            Fault.LOADING: BusyLoadingError("Valkey is loading the dataset in memory", status_code="LOADING"),
        }.get(self)

    @property
    def only_in_exec(self) -> bool:
        return self in (Fault.OOM, Fault.MISCONF, Fault.READONLY)

    def concerns(self, words: Sequence[str]) -> bool:
        """A server in this trouble refuses what these commands would do. A full one still takes what needs no room."""
        if not self.only_in_exec:
            return True
        return any(word in (NEEDS_ROOM if self is Fault.OOM else WRITES) for word in words)


class Blow(StrEnum):
    KILLED_BEFORE = "killed before sending"
    KILLED_AFTER = "killed after the server applied it"
    FROZEN_BEFORE = "frozen before sending"
    FROZEN_AFTER = "frozen after the server applied it"
    NOSCRIPT = "NOSCRIPT"
    ROLLED_BACK = "the server forgot its last change"

    @property
    def error(self) -> redis.RedisError | None:
        words = "No matching script. Please use EVAL."
        return NoScriptError(words, status_code="NOSCRIPT") if self is Blow.NOSCRIPT else None

    def concerns(self, words: Sequence[str]) -> bool:
        return True


Mishap = Fault | Blow

# Commands that Baton or RQ writes with.
NEEDS_ROOM = frozenset({"HINCRBY", "HSET", "LPUSH", "RPUSH", "SADD", "SET", "XADD", "ZADD"})
WRITES = NEEDS_ROOM | {
    "SREM",
    "DEL", "EXPIRE", "HDEL", "LREM", "PERSIST", "PEXPIRE", "PEXPIREAT", "ZREM", "ZREMRANGEBYSCORE",
}  # fmt: skip


class Plan:
    """`at`: the number of the message that fails, from 1; 0 for none. `times`: how many in a row from there on."""

    def __init__(self, fault: Fault | None = None, at: int = 0, *, times: int = 1, execs_only: bool = False) -> None:
        self.fault = fault
        self.at = at
        self.times = times
        self.execs_only = execs_only
        self.sent: list[str] = []
        self.fired = 0

    def next(self, words: list[str]) -> Mishap | None:
        """What happens to this message. May raise: then nothing is sent."""
        if self.execs_only and words[-1] != "EXEC":
            return None
        self.sent.append(" ".join(dict.fromkeys(words)))
        due = self.fault is not None and self.at <= len(self.sent) < self.at + self.times
        if not due or self.fault is None or (self.fault.only_in_exec and words[-1] != "EXEC"):
            return None
        self.fired += 1
        return self.fault

    def applied(self, mishap: Mishap, answers: list[Any]) -> list[Any] | None:
        """The server did as it was told, and these are its answers, errors among them. Gives those that arrive; None:
        the connection breaks first. May raise."""
        return None


class Faulty(AbstractConnection):
    """Mixed into a connection: follows the plan that `faulty` put on the class made for it."""

    plan: Plan
    _ready = False
    _answers: Sequence[Any] = ()

    def connect_check_health(self, *args: Any, **options: Any) -> None:
        if self._sock is None:
            self._ready, self._answers = False, ()  # the handshake is not part of the plan
            super().connect_check_health(*args, **options)
            self._ready = True

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self._sock is None:
            self.connect()
        words = first_words(command)
        mishap = self.plan.next(words) if self._ready else None
        if mishap is Fault.UNSENT:
            self.disconnect()
            raise redis.ConnectionError("cut before sending")
        if mishap is not None and mishap.error is not None:
            self._answers = [mishap.error for _ in words]  # one each: redis-py writes into them
            if words[-1] == "EXEC":
                self._answers = [b"OK", *self._answers[1:-1], ExecAbortError("discarded")]
            return
        super().send_packed_command(command, check_health)
        if mishap is not None:
            answers = [self._answer() for _ in words]
            arriving = self.plan.applied(mishap, answers)
            if arriving is None:
                self.disconnect()
            self._answers = [redis.ConnectionError("cut before the reply")] if arriving is None else arriving

    def _answer(self) -> Any:
        try:
            return super().read_response()
        except ResponseError as error:
            return error

    def read_response(self, *args: Any, **options: Any) -> Any:
        if not self._answers:
            return super().read_response(*args, **options)
        answer, *self._answers = self._answers
        if isinstance(answer, Exception):
            raise answer
        return answer

    def can_read(self, *args: Any, **options: Any) -> bool:
        return False if self._answers else super().can_read(*args, **options)


def faulty(url: str, plan: Plan, *, retry: Retry | None = None) -> redis.Redis:
    """A client as `worker.state.transact.connect` makes it, whose connections follow the plan."""
    pool = redis.ConnectionPool.from_url(url, retry=retry or Retry(NoBackoff(), 0), socket_timeout=5)
    return spoilt(redis.Redis(connection_pool=pool), plan)


def spoilt(client: redis.Redis, plan: Plan) -> redis.Redis:
    """The same client, whose connections follow the plan; it must not have opened any yet."""
    pool = client.connection_pool
    pool.connection_kwargs["driver_info"] = None  # no need to tell the server each time which library this is
    pool.connection_class = type("Planned", (Faulty, pool.connection_class), {"plan": plan})
    return client


def first_words(packed: Any) -> list[str]:
    """The name of each command in a packed message."""
    data = packed.encode() if isinstance(packed, str) else b"".join(packed) if _is_list(packed) else bytes(packed)
    names, place = [], 0
    while place < len(data):
        count, place = _line(data, place)
        for number in range(count):
            size, place = _line(data, place)
            if number == 0:
                names.append(data[place : place + size].decode().upper())
            place += size + 2
    return names


def _is_list(packed: Any) -> bool:
    return isinstance(packed, Sequence) and not isinstance(packed, bytes | bytearray | str)


def _line(data: bytes, place: int) -> tuple[int, int]:
    end = data.index(b"\r\n", place)
    return int(data[place + 1 : end]), end + 2
