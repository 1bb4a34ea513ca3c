"""One run: enqueue, kill when it is time, wait for the end of all tasks."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import redis

from enqueue.api import enqueue_task
from enqueue.ids import new_id
from ops.drill.arena import Arena
from ops.drill.effects import append_line
from ops.drill.facts import Outage
from ops.drill.fleet import EnvironmentFailed
from ops.drill.kills import Jobs, Killer, parent_of
from ops.drill.person import answer_holds
from ops.drill.plan import Kill
from ops.drill.show import Show, State
from ops.drill.watch import Acknowledged, Look, acknowledged, forgotten, look
from worker.errors import BatonError, RedisUnavailable, StorageRefused

TICK_S = 0.03
COME_UP_MAX_S = 60
PATIENCE_S = 40.0
SECONDS_MAX = 900.0
KILLS = "kills.jsonl"


@dataclass
class Run:
    """`tasks`: (text, when) in order. `patience_s`: after so long without any change what has not ended is lost; where
    its process lives, ten times as long, for a tool may take its time."""

    arena: Arena
    name: str
    tasks: Sequence[tuple[str, float]]
    kills: Sequence[Kill]
    show: Show
    patience_s: float = PATIENCE_S
    seconds_max: float = SECONDS_MAX
    forget_s: float = 0.0
    killer: Killer = field(init=False)
    outages: list[Outage] = field(default_factory=list)
    accepted: dict[str, str] = field(default_factory=dict)  # id → text
    owners: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)  # task, epoch → pid, slot

    def __post_init__(self) -> None:
        jobs = Jobs(self.arena.client, self.arena.store, self.arena.settings.queue)
        self.killer = Killer(self.arena.fleet, self.arena.server, jobs, self.forget_s)
        self._waiting = deque((new_id(), text, at) for text, at in self.tasks)
        self._due = deque(self.kills)
        self._look = Look()
        self._before: dict[str, Acknowledged | None] | None = None
        self._late_s = 0.0
        self._base = 0  # tasks that a run before this one has ended

    def hold(self) -> float:
        """Run it; how long it took, in seconds. Raises EnvironmentFailed."""
        self._base = look(self.arena.client, self.arena.store.keys, 0).counts["finished"]
        began = moved = time.monotonic()
        progress: tuple[int, ...] = ()
        while True:
            now = time.monotonic()
            try:
                self._step(now - began)
            except RedisUnavailable as error:
                raise EnvironmentFailed(f"the drill's own server did not come back: {error}") from error
            if self._look.progress != progress or not self.killer.server_is_up:
                moved, progress = now, self._look.progress
            if self._over():
                return now - began
            if now - moved > self._patience() or now - began > self.seconds_max:
                self._settle()
                return now - began
            time.sleep(TICK_S)

    def _patience(self) -> float:
        busy = any(parent_of(owned.pid) for owned in self._look.owned)
        return self.patience_s * 10 if busy else self.patience_s

    def _step(self, at_s: float) -> None:
        self.arena.fleet.pump()
        self.killer.tend()
        if self.killer.server_is_up:
            with suppress(redis.RedisError, RedisUnavailable, StorageRefused):
                self._see(at_s)
                self._enqueue(at_s)
                if self._look.counts.get("parked"):
                    answer_holds(self.arena)
        self._kill(at_s)
        self.show.state(self._state(at_s))

    def _see(self, at_s: float) -> None:
        keys = self.arena.store.keys
        if self._before is not None:
            after = acknowledged(self.arena.client, keys, list(self._before))
            self.outages.append(Outage(len(self._before), forgotten(self._before, after)))
            self._before = None
        self._look = look(self.arena.client, keys, at_s)
        for owned in self._look.owned:
            if (owned.task, owned.epoch) not in self.owners and (
                slot := self.arena.fleet.slot_of(owned.pid) or self.arena.fleet.slot_of(parent_of(owned.pid))
            ):
                self.owners[owned.task, owned.epoch] = (owned.pid, slot.name)

    def _enqueue(self, at_s: float) -> None:
        while self._waiting and self._waiting[0][2] <= at_s:
            task_id, text, _ = self._waiting[0]
            try:
                # Should the outcome be unknown, asking again with the same id is safe: the next step does it.
                enqueue_task(text, task_id=task_id, settings=self.arena.settings, client=self.arena.client)
            except BatonError:
                return
            self.accepted[task_id] = text
            self._waiting.popleft()

    def _kill(self, at_s: float) -> None:
        if not self._due or self._due[0].at_s + self._late_s > at_s or self._all_ended():
            return
        kill = self._due[0]
        if kill.kind == "redis" and self.killer.server_is_up:
            try:
                self._before = acknowledged(self.arena.client, self.arena.store.keys, list(self.accepted))
            except redis.RedisError:
                return
        if hit := self.killer.carry_out(kill, self._look):
            self._due.popleft()
            self._late_s = max(0.0, at_s - kill.at_s)  # what had to wait for a victim pushes back what comes after it
            append_line(self.arena.home / KILLS, json.dumps({"run": self.name, "seconds": round(at_s, 3), **vars(hit)}))
            self.show.hit(hit, at_s)

    def _over(self) -> bool:
        killer = self.killer
        return self._all_ended() and killer.server_is_up and self._before is None and not killer.leaving

    def _all_ended(self) -> bool:
        ended = self._look.counts.get("finished", 0) - self._base
        return not self._waiting and ended >= len(self.tasks)

    def _settle(self) -> None:
        """Some are lost. The server must be there to tell which."""
        if not self.killer.server_is_up:
            self.killer.start_server()

    def _state(self, at_s: float) -> State:
        counts = self._look.counts
        return State(
            phase=self.name,
            at_s=at_s,
            tasks=len(self.tasks),
            accepted=len(self.accepted),
            alive=len(self.arena.fleet.running("worker")),
            running=counts.get("running", 0),
            queued=counts.get("queued", 0),
            done=counts.get("finished", 0) - self._base,
            recovered=self._look.recovered,
            kills=tuple(hit.kind for hit in self.killer.hits),
            server_is_up=self.killer.server_is_up,
        )


def await_workers(arena: Arena, workers: int) -> None:
    """Wait until so many block for jobs, as the server sees it. Raises EnvironmentFailed."""
    until = time.monotonic() + COME_UP_MAX_S
    while True:
        arena.fleet.pump()
        idle = sum(client["cmd"] in ("blmove", "blpop") for client in arena.client.client_list())
        if idle >= workers:
            return
        if time.monotonic() > until:
            raise EnvironmentFailed(f"{idle} of {workers} workers came up in {COME_UP_MAX_S} s; see {arena.home}")
        time.sleep(0.05)
