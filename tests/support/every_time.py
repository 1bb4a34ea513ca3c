"""Time that passes only in sleeps, and what happens in them.

The heartbeat's renewals come when their time comes within somebody's sleep (the model's, a tool's, a wait for Redis).
Its own thread would send them at another place in each run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import redis

from tests.support.script import Answer, Script
from worker.clock import ManualClock
from worker.errors import LeaseLost, RedisUnavailable, StorageRefused
from worker.state.lease import Holder
from worker.state.store import Store

WORK_S = 6.0  # longer than a third of the lease: each answer of the model, and each side effect, sees a renewal

_AGE = """
local left = redis.call('PTTL', KEYS[1]) - ARGV[1]
if left > 0 then redis.call('PEXPIRE', KEYS[1], left) else redis.call('DEL', KEYS[1]) end
"""


class Clock(ManualClock):
    """Stands still but for sleeps. In them the holder's heart beats, and its lock grows old on the server, too."""

    def __init__(self, observer: redis.Redis, lock: str) -> None:
        super().__init__(int(time.time() * 1000))  # the server's own clock says when the other keys expire
        self.heart: Heart | None = None
        self._age = observer.register_script(_AGE)
        self._lock_key = lock

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self._age([self._lock_key], [math.ceil(seconds * 1000)])

    def sleep(self, seconds: float) -> None:
        until = self.monotonic() + seconds
        while self.heart is not None and self.heart.due_s <= until:
            self.advance(max(self.heart.due_s - self.monotonic(), 0))
            self.heart.beat()
        self.advance(max(until - self.monotonic(), 0))


class Heart:
    """Stands in for `worker.heartbeat.Heartbeat`: the same renewals and the same answers to their failures."""

    def __init__(self, store: Store, holder: Holder) -> None:
        assert isinstance(store.clock, Clock)
        self.store, self.holder, self.clock = store, holder, store.clock
        self.period_s = holder.lease_ttl_s / 3
        self.due_s = math.inf

    def __enter__(self) -> Heart:
        self.clock.heart = self
        self.beat()
        return self

    def __exit__(self, *_: object) -> None:
        self.clock.heart = None

    def beat(self) -> None:
        pause, self.due_s = self.period_s, math.inf  # no beat while it waits itself
        try:
            self.store.renew(self.holder)
        except LeaseLost:
            pause = math.inf
        except (RedisUnavailable, StorageRefused):
            pause /= 5
        self.due_s = self.clock.monotonic() + pause


class SlowScript(Script):
    """A model that takes its time once it was asked."""

    def __init__(self, clock: Clock, steps: list[Any]) -> None:
        super().__init__(*steps)
        self.clock = clock

    def respond(self, request: dict[str, Any], messages: Any, *, watch: Callable[[], None]) -> Answer:
        answer = super().respond(request, messages, watch=watch)
        self.clock.sleep(WORK_S)
        watch()
        return answer


class OneByOne:
    """Stands in for a pool of threads: each call is over before the next one begins."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, act: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(act(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None:
        pass
