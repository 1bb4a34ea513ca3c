"""What happened to a task, told in the EXEC that made it happen: its own stream, the fleet's feed, counters."""

from __future__ import annotations

from typing import Any

from redis.client import Pipeline

from worker.state.codec import encode
from worker.state.keys import Keys

TASK_EVENTS_MAX = 2_000
FEED_MAX = 10_000

# Types that go to the fleet's feed and are counted; the others are progress of one task.
LIFECYCLE = frozenset(
    {"created", "claimed", "parked", "woken", "handed-over", "recovered", "redelivered", "retried", "resolved", "ended"}
)


def tell(pipe: Pipeline, keys: Keys, task_id: str, kind: str, at_ms: int, /, **data: Any) -> None:
    """Queue one event. `data` must be JSON; it never holds task text, tool inputs or secrets for LIFECYCLE kinds."""
    fields: dict[Any, Any] = {"type": kind, "atMs": at_ms, "data": encode(data)}
    pipe.xadd(keys.events(task_id), fields, maxlen=TASK_EVENTS_MAX, approximate=True)
    if kind in LIFECYCLE:
        pipe.xadd(keys.feed(), {"task": task_id, **fields}, maxlen=FEED_MAX, approximate=True)
        pipe.hincrby(keys.counters(), kind if kind != "ended" else str(data["status"]), 1)
