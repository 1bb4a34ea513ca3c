"""Gathers the facts of a run once it is over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import redis

from ops.drill import effects
from ops.drill.arena import REQUESTS, Arena
from ops.drill.facts import Event, Facts, Json, TaskFacts
from ops.drill.run import Run
from ops.drill.tools import WORLD
from ops.transcript import first_text
from worker.errors import BatonError
from worker.state.codec import decode
from worker.state.keys import Keys
from worker.state.standing import text
from worker.state.task import Task
from worker.state.views import Views

EVENTS_MAX = 10_000


def collect(run: Run, seconds: float, expected: str = "") -> Facts:
    """Reads Redis and the logs. Tasks in the order they were accepted in."""
    owners = [(task, epoch, pid, slot) for (task, epoch), (pid, slot) in run.owners.items()]
    slots = run.arena.fleet.slots
    return Facts(
        tasks=task_facts(run.arena, run.accepted),
        hits=tuple(run.killer.hits),
        outages=tuple(run.outages),
        expected=expected,
        seconds=seconds,
        owners=tuple(owners),
        grace_s=run.arena.settings.drain_grace_s,
        workers=tuple((pid, slot.name) for slot in slots for pid in slot.pids if slot.run == "worker"),
    )


def task_facts(arena: Arena, accepted: Mapping[str, str]) -> tuple[TaskFacts, ...]:
    """`accepted`: id → text."""
    reader = Reader(arena.client, arena.store.keys)
    requests, ran, world = defaultdict(list), defaultdict(list), defaultdict(list)
    for line in effects.read_lines(arena.home / REQUESTS):
        requests[first_text(line["body"])].append(line)
    for line in effects.read_lines(arena.home / effects.FILE):
        ran[line["task"]].append(line)
    for line in effects.read_lines(arena.home / "workspace" / WORLD):
        world[line["task"]].append(line)
    return tuple(reader.task(id_, text_, requests[text_], ran[id_], world[id_]) for id_, text_ in accepted.items())


class Reader:
    """Reads one task after another; what cannot be read is left out, and is missed by the verdict."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client: Any = client
        self.keys = keys
        self.views = Views(client, keys)

    def task(self, task_id: str, asked: str, requests: list[Json], ran: list[Json], world: list[Json]) -> TaskFacts:
        logged: dict[str, Any] = {"requests": tuple(requests), "effects": tuple(ran), "world": tuple(world)}
        try:
            task = self.views.task(task_id)
        except BatonError:
            return TaskFacts(task_id, asked, "", **logged)
        return TaskFacts(
            task_id,
            asked,
            task.status.value,
            result=task.result,
            **self._record(task),
            **self._checkpoint(task_id),
            events=self._events(task_id),
            messages=tuple(decode(raw) for raw in self.client.lrange(self.keys.messages(task_id), 0, -1)),
            ledger=self._documents(self.keys.ledger(task_id)),
            started=self._documents(self.keys.started(task_id)),
            **logged,
        )

    def _record(self, task: Task) -> Json:
        return {"reason": task.reason, "crashes": task.crashes, "parks": task.parks, "attempts": task.attempts}

    def _checkpoint(self, task_id: str) -> Json:
        found = self.client.hmget(self.keys.checkpoint(task_id), "turns", "totalTokens", "messageCount", "tokensUsed")
        turns, tokens, count = (int(part or 0) for part in found[:3])
        used = decode(found[3] or b"{}")
        return {"turns": turns, "total_tokens": tokens, "message_count": count, "tokens_used": used}

    def _events(self, task_id: str) -> tuple[Event, ...]:
        found: list[Event] = []
        cursor = "0"
        while (page := self.views.events(task_id, cursor)) and len(found) < EVENTS_MAX:
            found += [Event(event.kind, event.at_ms, event.data) for event in page]
            cursor = page[-1].cursor
        return tuple(found)

    def _documents(self, key: str) -> dict[str, Json]:
        """Those of calls: `turn:call`, not the `lapsed:epoch` that stand among the start markers."""
        fields = {text(name): raw for name, raw in self.client.hgetall(key).items()}
        return {name: decode(raw) for name, raw in fields.items() if name.partition(":")[0].isdigit()}
