"""What the sweeper keeps between two passes, in Redis, so that any number of sweepers share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis

from worker.state.keys import Keys
from worker.state.standing import text
from worker.state.views import Queued

DOUBLINGS_MAX = 4


def missed(client: redis.Redis, keys: Keys) -> dict[str, float]:
    """Deliveries (`task:delivery`) that earlier sweeps found on no RQ list → when they first did, ms."""
    redis_: Any = client
    return {text(member): score for member, score in redis_.zrange(keys.missing(), 0, -1, withscores=True)}


def overdue(
    client: redis.Redis, keys: Keys, known: Mapping[str, float], missing: Sequence[Queued], now_ms: int, grace_ms: int
) -> list[Queued]:
    """Of the deliveries that are on no RQ list now, those that were missed for at least `grace_ms` without a break.

    A single look proves nothing: between RQ's pop and our claim a delivery is rightly on no list. On a machine so
    loaded that a start takes longer than that, each new delivery makes the one that is starting stale; so the grace
    doubles with every delivery that came to nothing. `known`: what `missed` said before this look, which must have
    included all of it.
    """
    names = {f"{queued.task_id}:{queued.delivery}": queued for queued in missing}
    back = [name for name in known if name not in names]
    new = {name: now_ms for name in names if name not in known}
    if back or new:
        with client.pipeline(transaction=False) as pipe:
            if back:
                pipe.zrem(keys.missing(), *back)
            if new:
                pipe.zadd(keys.missing(), new, nx=True)
            pipe.execute()
    return [
        queued
        for name, queued in names.items()
        if known.get(name, now_ms) <= now_ms - grace_ms * 2 ** min(queued.redeliveries, DOUBLINGS_MAX)
    ]


def prune(client: redis.Redis, keys: Keys, before_ms: int) -> int:
    """Drop ended tasks from their index whose keys have expired by now. Returns how many."""
    return int(client.zremrangebyscore(keys.index("finished"), "-inf", before_ms))
