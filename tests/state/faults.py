"""A connection to a real server that fails once, at a chosen message, in a chosen way.

A message is what goes to the server in one piece: WATCH, the reads, MULTI…EXEC, UNWATCH. The fault is made where
redis-py sees it, on the connection, so everything above (retries, WatchError, pool) is the real thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.exceptions import BusyLoadingError, ExecAbortError, OutOfMemoryError, ReadOnlyError, ResponseError
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


class Plan:
    """`at`: the number of the message that fails, from 1; 0 for none. `times`: how many in a row from there on."""

    def __init__(self, fault: Fault | None = None, at: int = 0, *, times: int = 1, execs_only: bool = False) -> None:
        self.fault = fault
        self.at = at
        self.times = times
        self.execs_only = execs_only
        self.sent: list[str] = []
        self.fired = 0

    def next(self, words: list[str]) -> Fault | None:
        if self.execs_only and words[-1] != "EXEC":
            return None
        self.sent.append(" ".join(dict.fromkeys(words)))
        due = self.fault is not None and self.at <= len(self.sent) < self.at + self.times
        if not due or self.fault is None or (self.fault.only_in_exec and words[-1] != "EXEC"):
            return None
        self.fired += 1
        return self.fault


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
        fault = self.plan.next(first_words(command)) if self._ready else None
        if fault is Fault.UNSENT:
            self.disconnect()
            raise redis.ConnectionError("cut before sending")
        if fault is not None and (error := fault.error) is not None:
            words = first_words(command)
            self._answers = [error] * len(words)
            if words[-1] == "EXEC":
                self._answers = [b"OK", *[error] * (len(words) - 2), ExecAbortError("discarded")]
            return
        super().send_packed_command(command, check_health)
        if fault is Fault.LOST:
            for _ in first_words(command):
                with suppress(ResponseError):
                    super().read_response()
            self.disconnect()
            self._answers = [redis.ConnectionError("cut before the reply")]

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
    base = redis.UnixDomainSocketConnection if url.startswith("unix") else redis.Connection
    kind = type("Planned", (Faulty, base), {"plan": plan})
    pool = redis.ConnectionPool.from_url(
        url, connection_class=kind, retry=retry or Retry(NoBackoff(), 0), socket_timeout=5
    )
    return redis.Redis(connection_pool=pool)


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
