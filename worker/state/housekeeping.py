"""What the sweeper keeps between two passes, in Redis, so that any number of sweepers share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from worker.state.keys import Keys
from worker.state.standing import text


def overdue(
    client: redis.Redis, keys: Keys, missing: Sequence[tuple[str, int]], now_ms: int, grace_ms: int
) -> list[tuple[str, int]]:
    """Of the deliveries that are on no RQ list now, those that were missed for at least `grace_ms` without a break.

    A single look proves nothing: between RQ's pop and our claim a delivery is rightly on no list.
    """
    redis_: Any = client
    known = {text(member): score for member, score in redis_.zrange(keys.missing(), 0, -1, withscores=True)}
    names = {f"{task_id}:{delivery}": (task_id, delivery) for task_id, delivery in missing}
    back = [name for name in known if name not in names]
    new = {name: now_ms for name in names if name not in known}
    if back or new:
        with client.pipeline(transaction=False) as pipe:
            if back:
                pipe.zrem(keys.missing(), *back)
            if new:
                pipe.zadd(keys.missing(), new, nx=True)
            pipe.execute()
    return [about for name, about in names.items() if known.get(name, now_ms) <= now_ms - grace_ms]


def prune(client: redis.Redis, keys: Keys, before_ms: int) -> int:
    """Drop ended tasks from their index whose keys have expired by now. Returns how many."""
    return int(client.zremrangebyscore(keys.index("finished"), "-inf", before_ms))
