"""Follow one task: its events as they come, until its end.

Reads only. A cut connection is made again and the reading goes on after the last event that was seen, so none is
shown twice and none is missed, unless the stream's cap dropped it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import redis

from enqueue.trouble import AWAY
from worker.clock import Clock, SystemClock
from worker.errors import RedisUnavailable
from worker.state.views import Event, Views

T = TypeVar("T")

BLOCK_MS = 2_000
BATCH = 500
PATIENCE_S = 60.0
PAUSE_S, PAUSE_MAX_S = 0.05, 1.0


def follow(
    views: Views,
    task_id: str,
    after: str = "0",
    *,
    until: float = math.inf,
    patience_s: float = PATIENCE_S,
    clock: Clock | None = None,
    on_away: Callable[[Exception], None] = lambda error: None,
) -> Iterator[Event]:
    """Events after the cursor `after`, old ones first, then new ones as they come; ends when the task has ended.

    An "ended" that is followed by "retried" is no end. `until`: monotonic seconds of `clock` at which TimeoutError
    is raised. `on_away` is told once per outage; one of `patience_s` seconds raises RedisUnavailable. Raises
    TaskNotFound if there is no such task, or none any more.
    """
    clock = clock or SystemClock()
    reader = _Reader(clock, patience_s, until, on_away)
    cursor, wait_ms, ended = after, 0, False
    while True:

        def ask(after: str = cursor, block_ms: int | None = wait_ms or None) -> list[Event]:
            return views.events(task_id, after, block_ms=block_ms, limit=BATCH)

        events = reader.read(ask)
        for event in events:
            cursor = event.cursor
            yield event
        if events:
            wait_ms, ended = 0, False
        elif ended:
            return  # it had ended before this read, and nothing came after that
        else:
            ended = reader.read(lambda: views.status(task_id)).ended
            left_s = until - clock.monotonic()
            if not ended and left_s <= 0:
                raise TimeoutError(f"task {task_id} has not ended yet")
            wait_ms = 0 if ended else _block_ms(views.client, left_s)


class _Reader:
    """Repeats a read until Redis answers."""

    def __init__(self, clock: Clock, patience_s: float, until: float, on_away: Callable[[Exception], None]) -> None:
        self.clock = clock
        self.patience_s = patience_s
        self.until = until
        self.on_away = on_away

    def read(self, ask: Callable[[], T]) -> T:
        pause_s, give_up_at = PAUSE_S, math.inf
        while True:
            try:
                return ask()
            except redis.AuthenticationError:
                raise
            except (*AWAY, redis.exceptions.MasterDownError) as error:
                now = self.clock.monotonic()
                if give_up_at == math.inf:
                    give_up_at = now + self.patience_s
                    self.on_away(error)
                if now >= self.until:
                    raise TimeoutError("Redis does not answer, so nobody knows whether the task has ended") from error
                if now >= give_up_at:
                    raise RedisUnavailable(f"no answer from Redis for {self.patience_s:.0f} s") from error
            self.clock.sleep(min(pause_s, max(self.until - now, 0)))
            pause_s = min(pause_s * 2, PAUSE_MAX_S)


def _block_ms(client: redis.Redis, left_s: float) -> int:
    """How long the server may hold our read back: well below the client's own patience with its socket."""
    timeout_s = client.connection_pool.connection_kwargs.get("socket_timeout") or math.inf
    return max(1, int(min(BLOCK_MS, timeout_s * 500, left_s * 1000)))
