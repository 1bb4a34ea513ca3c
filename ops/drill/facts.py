"""All that is known when a drill is over, from outside (effect log, model's request log) and from the tasks' records.

Plain data: the verdict is a pure function of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Hit:
    """A kill as it happened. `tasks` were being worked on by what was killed; `until` is when the process was let go
    on, had ended by itself, or the server was back; `status` how it ended, as waitpid says. Times are seconds since
    1970."""

    kind: str
    at: float
    pid: int
    slot: str
    tasks: tuple[str, ...] = ()
    due_s: float = 0.0
    until: float | None = None
    status: int | None = None


@dataclass(frozen=True)
class Event:
    """One entry of a task's stream."""

    kind: str
    at_ms: int
    data: Json


@dataclass(frozen=True)
class TaskFacts:
    """One accepted task. `status` is "" if Redis knows nothing of it. `requests`: lines of the model's log; `effects`:
    lines of the effect log; `world`: what the drill's own tools did to the world; `ledger` and `started`: field
    (`turn:call`) → stored document."""

    id: str
    text: str
    status: str
    reason: str = ""
    crashes: int = 0
    parks: int = 0
    attempts: int = 0
    turns: int = 0
    total_tokens: int = 0
    message_count: int = 0
    events: tuple[Event, ...] = ()
    messages: tuple[Json, ...] = ()
    ledger: dict[str, Json] = field(default_factory=dict)
    started: dict[str, Json] = field(default_factory=dict)
    requests: tuple[Json, ...] = ()
    effects: tuple[Json, ...] = ()
    world: tuple[Json, ...] = ()
    result: str = ""
    tokens_used: Json = field(default_factory=dict)

    @property
    def paid(self) -> int:
        """How often the model answered; a request that met a scripted fault costs nothing."""
        return sum(line.get("status") == 200 and not line.get("fault") for line in self.requests)

    @property
    def ended(self) -> bool:
        return self.status in ("succeeded", "failed", "cancelled", "dead")


@dataclass(frozen=True)
class Outage:
    """What was compared over a death of the server: how many tasks, and what it forgot of which."""

    compared: int
    forgotten: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """One run. `expected`: how each task should end, "" if nobody can say. `stopped`: pids that were stopped for longer
    than a lease."""

    tasks: tuple[TaskFacts, ...]
    hits: tuple[Hit, ...] = ()
    outages: tuple[Outage, ...] = ()
    expected: str = ""
    seconds: float = 0.0
    owners: tuple[tuple[str, int, int, str], ...] = ()  # task, epoch, pid, slot
    workers: tuple[tuple[int, str], ...] = ()  # pid of a worker, its slot
    grace_s: float = 0.0  # within which a worker that was told to go has to be gone

    @property
    def stopped(self) -> frozenset[int]:
        return frozenset(hit.pid for hit in self.hits if hit.kind == "stop")
