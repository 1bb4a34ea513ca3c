"""Carrying out a kill: finds who is working at that moment, sends the signal, says what was hit.

Only processes of the drill's own fleet and its own server are ever touched.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import redis
from rq import Queue

from ops import valkey
from ops.drill.facts import Hit
from ops.drill.fleet import Fleet, Slot
from ops.drill.plan import Kill
from ops.drill.watch import Look, Owned
from worker.errors import RedisUnavailable
from worker.state.standing import text
from worker.state.store import Store

SETTLE_S = 1.0  # after its start a worker listens


@dataclass
class Stopped:
    """A work-horse to be let go on. `number`: which hit it was."""

    number: int
    pid: int
    started: str
    until: float


class Killer:
    """Kills in one fleet on one server, and keeps the list of what it did."""

    def __init__(self, fleet: Fleet, server: valkey.Server, jobs: Jobs, forget_s: float = 0.0) -> None:
        self.jobs = jobs
        self.fleet = fleet
        self.server = server
        self.hits: list[Hit] = []
        self.stopped: list[Stopped] = []
        self.leaving: dict[int, int] = {}  # pid of a worker that was told to go → which hit that was
        self.back_at: float | None = None  # when the server is to be started again
        self._outage = 0
        self._memory = Memory(server.directory, forget_s)

    @property
    def server_is_up(self) -> bool:
        return self.back_at is None

    def carry_out(self, kill: Kill, look: Look) -> Hit | None:
        """Do it; None if nobody whom it could hit is there just now."""
        if kill.kind == "redis":
            return self._kill_server(kill, look) if self.server_is_up else None
        if kill.kind == "job":
            return self._meddle(kill, look) if self.server_is_up else None
        if kill.kind == "sweeper":
            sweepers = self.fleet.running("sweeper")
            return self._kill_sweeper(kill, sweepers[kill.pick % len(sweepers)]) if sweepers else None
        if kill.kind == "term":
            return self._tell_to_go(look)
        working = self._working(look)
        if not working:
            return None
        owned, slot = working[kill.pick % len(working)]
        return self._kill_working(kill, owned, slot, look)

    def tend(self) -> None:
        """Let go on, and start again, what is due. Raises RedisUnavailable if the server does not come back."""
        now = time.monotonic()
        if self.server_is_up:
            self._memory.note(now)
        for one in [one for one in self.stopped if now >= one.until]:
            self._let_go_on(one)
        if self.back_at is not None and now >= self.back_at:
            self.start_server()
        for pid in [pid for pid in self.leaving if pid in self.fleet.exits]:
            number, (at, status) = self.leaving.pop(pid), self.fleet.exits[pid]
            self.hits[number] = replace(self.hits[number], until=at, status=status)

    def start_server(self) -> None:
        where = self.server
        self.server = valkey.ensure(where.directory, with_parent=True)
        if self.server.url != where.url:
            raise RedisUnavailable(f"the server came back at {self.server.url}, it was at {where.url}")
        self.hits[self._outage] = replace(self.hits[self._outage], until=time.time())
        self.back_at = None
        self.fleet.filling = True

    def let_all_go_on(self) -> None:
        for one in list(self.stopped):
            self._let_go_on(one)

    def _working(self, look: Look) -> list[tuple[Owned, Slot]]:
        """Who runs a task in a worker of ours, and is not stopped."""
        workers = {slot.pid: slot for slot in self.fleet.running("worker")}
        stopped = {one.pid for one in self.stopped}
        found = []
        for owned in sorted(look.owned, key=lambda owned: owned.task):
            slot = workers.get(owned.pid) or workers.get(parent_of(owned.pid))
            if slot is not None and owned.pid not in stopped:
                found.append((owned, slot))
        return found

    def _tell_to_go(self, look: Look) -> Hit | None:
        """The worker that has been there for longest, once the last one is gone and its successor works."""
        settled = time.monotonic() - SETTLE_S
        workers = [slot for slot in self.fleet.running("worker") if slot.since <= settled]
        enough = min(2, sum(slot.run == "worker" for slot in self.fleet.slots))
        if self.leaving or not self.server_is_up or len(workers) < enough:
            return None
        slot = min(workers, key=lambda slot: slot.since)
        tasks = tuple(o.task for o in look.owned if slot.pid in (o.pid, parent_of(o.pid)))
        hit = Hit("term", time.time(), slot.pid, slot.name, tasks)
        self.leaving[slot.pid] = len(self.hits)
        self.fleet.terminate(slot)
        return self._note(hit)

    def _kill_working(self, kill: Kill, owned: Owned, slot: Slot, look: Look) -> Hit:
        at, pid = time.time(), owned.pid
        tasks = tuple(one.task for one in look.owned if one.pid == pid)  # more than one where they are threads
        match kill.kind:
            case "worker":
                pid = slot.pid
                self.fleet.kill(slot)
            case "both":
                self.fleet.kill(slot, then=owned.pid)
            case "horse":
                with suppress(ProcessLookupError):
                    os.kill(owned.pid, signal.SIGKILL)
            case "stop":
                started = started_of(owned.pid)
                with suppress(ProcessLookupError):
                    os.kill(owned.pid, signal.SIGSTOP)
                until = time.monotonic() + kill.pause_s
                self.stopped.append(Stopped(len(self.hits), owned.pid, started, until))
        return self._note(Hit(kill.kind, at, pid, slot.name, tasks, kill.at_s))

    def _kill_sweeper(self, kill: Kill, slot: Slot) -> Hit:
        hit = Hit(kill.kind, time.time(), slot.pid, slot.name, (), kill.at_s)
        self.fleet.kill(slot)
        return self._note(hit)

    def _meddle(self, kill: Kill, look: Look) -> Hit | None:
        with suppress(redis.RedisError):
            if done := self.jobs.meddle(kill.pick, [owned.task for owned in look.owned]):
                return self._note(Hit(kill.kind, time.time(), 0, done, (), kill.at_s))
        return None

    def _kill_server(self, kill: Kill, look: Look) -> Hit:
        self.fleet.filling = False
        self._outage = len(self.hits)
        at = time.time()
        self.server.kill()
        self._memory.cut()
        self.back_at = time.monotonic() + kill.pause_s
        tasks = tuple(owned.task for owned in look.owned)
        return self._note(Hit(kill.kind, at, self.server.pid, "server", tasks, kill.at_s))

    def _let_go_on(self, one: Stopped) -> None:
        self.stopped.remove(one)
        if started_of(one.pid) == one.started:
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGCONT)
            self.hits[one.number] = replace(self.hits[one.number], until=time.time())

    def _note(self, hit: Hit) -> Hit:
        self.hits.append(hit)
        return hit


@dataclass(frozen=True)
class Jobs:
    """Loses and doubles the wake-ups of tasks."""

    client: Any
    store: Store
    queue: str

    def meddle(self, pick: int, running: list[str]) -> str:
        """In words what was done; "" if there is no job to do it to."""
        waiting = [text(name) for name in self.client.lrange(Queue.redis_queue_namespace_prefix + self.queue, 0, -1)]
        if waiting and pick % 3 == 0:
            self.client.lrem(Queue.redis_queue_namespace_prefix + self.queue, 0, waiting[pick % len(waiting)])
            return f"lost the job of {_task_of(waiting[pick % len(waiting)])}"
        current = [f"{task}-{text(self.client.hget(self.store.keys.task(task), 'delivery'))}" for task in running]
        names = waiting[:1] if waiting and pick % 3 == 1 else current
        if names:
            self.client.lpush(Queue.redis_queue_namespace_prefix + self.queue, names[pick % len(names)])
            return f"doubled the job of {_task_of(names[pick % len(names)])}"
        return ""


def _task_of(job: str) -> str:
    """A job is named after its task and the number of the delivery."""
    return job.rpartition("-")[0]


class Memory:
    """For a sabotage: makes a dead server forget what it was told in its last `forget_s` seconds, by cutting its
    append-only file to the length it had then. 0 forgets nothing."""

    def __init__(self, directory: Path, forget_s: float) -> None:
        self.files = directory / "appendonlydir"
        self.forget_s = forget_s
        self._sizes: deque[tuple[float, dict[Path, int]]] = deque()

    def note(self, now: float) -> None:
        if not self.forget_s:
            return
        self._sizes.append((now, {path: path.stat().st_size for path in self.files.glob("*.incr.aof")}))
        while len(self._sizes) > 1 and self._sizes[1][0] < now - self.forget_s:
            self._sizes.popleft()

    def cut(self) -> None:
        if self._sizes:
            for path, size in self._sizes[0][1].items():
                os.truncate(path, size)
            self._sizes.clear()


def parent_of(pid: int) -> int:
    """0 if there is no such process."""
    return int(_stat(pid, 1) or 0)


def started_of(pid: int) -> str:
    """Its start time; with the pid, the name of one process for ever. "" if there is none."""
    return _stat(pid, 19)


def _stat(pid: int, field: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[field]
    except OSError:
        return ""
