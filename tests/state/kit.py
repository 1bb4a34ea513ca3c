"""What the tests of the state layer share: stores, tasks in every state, whole dumps.

`T` is the task all of them look at. Helpers that bring a task into a state use nothing but verbs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from worker.clock import Clock, ManualClock
from worker.dispatch import open_store
from worker.settings import Settings, load_settings
from worker.state.checkpoint import Checkpoint, tool_calls
from worker.state.codec import digest
from worker.state.keys import INDEXES
from worker.state.lease import Holder
from worker.state.ledger import Call, Entry
from worker.state.server import FixedProbe
from worker.state.standing import text
from worker.state.store import Store
from worker.state.task import NewTask, Status
from worker.state.views import Views
from worker.sweeper import Sweeper

T = "t1"
QUEUE = "rq:queue:agents"
REQUEST = {"model": "m", "max_tokens": 10, "tools": []}
OWNER = {"host": "h", "pid": 1}


def sweeper_of(store: Store) -> Sweeper:
    return Sweeper(store, store.writes.dispatcher, settings())  # type: ignore[arg-type]


def advance(store: Store, seconds: float) -> None:
    assert isinstance(store.clock, ManualClock)
    store.clock.advance(seconds)


def settings(**values: Any) -> Settings:
    return load_settings({}, **values)


def make_store(client: redis.Redis, *, clock: Clock | None = None, **values: Any) -> Store:
    """The production store; its clock stands still unless told otherwise, and it takes the server for a fixed one."""
    store = open_store(settings(**values), client)
    # Started at the real time: Redis itself counts the expiry of keys by its own clock.
    store.clock = clock or ManualClock(int(time.time() * 1000))
    store.probe = FixedProbe()
    return store


def new_task(task_id: str = T, words: str = "say hello", **fields: Any) -> NewTask:
    return NewTask(task_id, words, "agents", **fields)


# -- a conversation ------------------------------------------------------------------------------------------------


def use(call_id: str = "toolu_1", name: str = "append", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given or {"line": "x"}}


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def answered(*call_ids: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "ok"} for id in call_ids]}


FIRST = {"role": "user", "content": "say hello"}
BLANK = Checkpoint(messages=[FIRST])


def after_response(now: Checkpoint, *blocks: dict[str, Any], tokens: int = 10) -> Checkpoint:
    message = said(*blocks)
    return Checkpoint(
        turns=now.turns + 1,
        tokens_used={"input_tokens": now.tokens_used.get("input_tokens", 0) + tokens},
        total_tokens=now.total_tokens + tokens,
        messages=[*now.messages, message],
        pending=tool_calls(message, now.turns + 1),
        stop_reason="tool_use" if tool_calls(message, 0) else "end_turn",
    )


def after_results(now: Checkpoint) -> Checkpoint:
    return Checkpoint(
        turns=now.turns,
        tokens_used=now.tokens_used,
        total_tokens=now.total_tokens,
        messages=[*now.messages, answered(*(call.id for call in now.pending))],
        stop_reason=now.stop_reason,
        server_run_id=now.server_run_id,
    )


AT_A = after_response(BLANK, use())
AT_B = after_results(AT_A)
CALL = AT_A.pending[0]


def entry_for(call: Call, content: str = "ok") -> Entry:
    return Entry(call.name, digest(call.input), content, False, epoch=1)


# -- a task in a state ---------------------------------------------------------------------------------------------


def claim(store: Store, task_id: str = T) -> Holder:
    """Claim the task's current delivery, as a worker that popped it from its list."""
    delivery = int(store.client.hget(store.keys.task(task_id), "delivery") or 0)
    pop(store.client, f"{task_id}-{delivery}")
    holder = store.claim(task_id, delivery, OWNER)
    assert isinstance(holder, Holder), holder
    return holder


def pop(client: redis.Redis, job: str) -> None:
    """What RQ does with a job from pop to end: off the list, and a ttl on its hash."""
    client.lrem(QUEUE, 0, job)
    client.expire(f"rq:job:{job}", 600)


def queued(store: Store) -> None:
    store.create(new_task())


def claimed(store: Store) -> Holder:
    queued(store)
    return claim(store)


def begun(store: Store) -> Holder:
    holder = claimed(store)
    store.begin(holder, REQUEST, FIRST)
    return holder


def at_a(store: Store) -> Holder:
    holder = begun(store)
    store.save_response(holder, AT_A.messages[-1], AT_A)
    return holder


def marked(store: Store) -> Holder:
    holder = at_a(store)
    store.mark_started(holder, CALL)
    return holder


def recorded(store: Store) -> Holder:
    holder = marked(store)
    store.record_result(holder, CALL, entry_for(CALL))
    return holder


def at_b(store: Store) -> Holder:
    holder = recorded(store)
    store.save_results(holder, AT_B.messages[-1], AT_B)
    return holder


def parked(store: Store) -> Holder:
    holder = at_a(store)
    store.park(holder, "waits", wait_ms=5_000)
    return holder


def ended(store: Store, status: Status) -> Holder:
    holder = at_b(store)
    store.finish(holder, status, reason="because", result="r")
    return holder


def dead(store: Store) -> Holder:
    holder = at_a(store)
    for _ in range(store.policy.crashes_in_row_max):
        lapse(store)
        if store.recover(T, proof="test") is Status.QUEUED:
            holder = claim(store)
    return holder


def lapse(store: Store, task_id: str = T) -> None:
    """The lease ran out: Redis has dropped the lock."""
    store.client.delete(store.keys.lock(task_id))


STATES: dict[str, Callable[[Store], Any]] = {
    "absent": lambda store: None,
    "queued": queued,
    "running": at_a,
    "parked": parked,
    "succeeded": lambda store: ended(store, Status.SUCCEEDED),
    "failed": lambda store: ended(store, Status.FAILED),
    "cancelled": lambda store: ended(store, Status.CANCELLED),
    "dead": dead,
}


# -- looking -------------------------------------------------------------------------------------------------------


def status(store: Store, task_id: str = T) -> Status:
    return Views(store.client, store.keys).status(task_id)


def field(store: Store, name: str, task_id: str = T) -> str:
    return text(store.client.hget(store.keys.task(task_id), name))


def number(store: Store, name: str, task_id: str = T) -> int:
    return int(field(store, name, task_id) or 0)


def jobs(client: redis.Redis) -> list[str]:
    """Ids on the RQ list, next one first."""
    return [text(job) for job in client.lrange(QUEUE, 0, -1)]


def indexes_of(store: Store, task_id: str = T) -> list[str]:
    return [name for name in INDEXES if store.client.zscore(store.keys.index(name), task_id) is not None]


def kinds(store: Store, task_id: str = T) -> list[str]:
    """The events of a task, oldest first."""
    return [event.kind for event in Views(store.client, store.keys).events(task_id)]


def counters(store: Store) -> dict[str, int]:
    return {text(name): int(value) for name, value in store.client.hgetall(store.keys.counters()).items()}


def dump(client: redis.Redis) -> dict[str, tuple[Any, int]]:
    """Every key of the database with its whole value and the moment it expires (-1: never)."""
    return {text(key): (_value(client, key), client.pexpiretime(key)) for key in sorted(client.scan_iter(count=1000))}


def _value(client: redis.Redis, key: bytes) -> Any:
    match text(client.type(key)):
        case "string":
            return client.get(key)
        case "hash":
            return client.hgetall(key)
        case "list":
            return client.lrange(key, 0, -1)
        case "set":
            return client.smembers(key)
        case "zset":
            return client.zrange(key, 0, -1, withscores=True)
        case "stream":
            return client.xrange(key)
        case other:
            return other


@contextmanager
def nothing_written(client: redis.Redis) -> Iterator[None]:
    before = dump(client)
    yield
    assert dump(client) == before


@dataclass
class Watched:
    """Commands the server saw, in order: words of each, upper-case first."""

    commands: list[list[str]]

    def touching(self, key: str) -> list[list[str]]:
        return [words for words in self.commands if key in words[1:]]


@contextmanager
def monitored(client: redis.Redis) -> Iterator[Watched]:
    """Everything the server is told while the block runs (MONITOR: real servers only)."""
    seen = Watched([])
    with client.monitor() as monitor:
        yield seen
        client.echo("that was all")
        while "that was all" not in (command := monitor.next_command()["command"]):
            words = command.split(" ")
            seen.commands.append([words[0].upper(), *words[1:]])
