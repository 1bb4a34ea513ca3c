"""`--matrix`: one death at every crash point, for every nature of a tool, of the work-horse and of worker and horse.

A worker a crash point, each on a queue of its own, side by side; its cases one after the other. A case's process waits
at its point to be killed from outside, so nothing here depends on luck.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from enqueue.api import enqueue_task
from ops.drill.arena import Arena, open_arena
from ops.drill.collect import task_facts
from ops.drill.facts import TaskFacts
from ops.drill.fleet import EnvironmentFailed, Slot
from ops.drill.hold import OWN_TOOLS, SWEEPERS
from ops.drill.matrix_table import Line, Probe, judge_line, probes_of
from ops.drill.run import await_workers
from ops.drill.show import Show
from worker.crashpoints import POINTS
from worker.errors import RedisUnavailable
from worker.state.task import Status
from worker.state.views import Views

DEATHS = ("horse", "both")
CASE_MAX_S = 60
TICK_S = 0.02


@dataclass(frozen=True)
class Case:
    """One line of the matrix."""

    label: str
    probe: Probe
    death: str

    @property
    def text(self) -> str:
        return f"drill matrix {self.label} {self.death} {self.probe.tool}"


@dataclass
class Lane:
    """The worker that dies at one point, and what it has still to die for."""

    arena: Arena
    label: str
    cases: deque[Case]
    slot: Slot = field(init=False)
    case: Case | None = None
    task: str = ""
    died: bool = False
    since: float = 0.0

    def __post_init__(self) -> None:
        self.queue = f"matrix-{self.label}"
        self.once = self.arena.home / f"{self.label}.once"
        environ = {"CRASH_AFTER": f"{self.label}:1", "CRASH_ONCE": str(self.once), "CRASH_WAIT": "1"}
        self.slot = self.arena.fleet.add(self.queue, "worker", BATON_QUEUE=self.queue, **environ)
        self.views = Views(self.arena.client, self.arena.store.keys)

    def step(self) -> tuple[Case, str, bool] | None:
        """Move on; (case, task, whether anybody died) once a case is over."""
        if self.case is None:
            self._begin()
            return None
        if not self.died and self.once.exists():
            self._kill()
        status = self.views.status(self.task)
        if status is Status.PARKED:  # for a person, whom a drill does not have
            self.arena.store.cancel(self.task, "the drill")
        if not status.ended and time.monotonic() - self.since < CASE_MAX_S:
            return None
        over = (self.case, self.task, self.died)
        self.case = None
        self.once.unlink(missing_ok=True)
        return over

    @property
    def busy(self) -> bool:
        return self.case is not None or bool(self.cases)

    def _begin(self) -> None:
        if self.cases and self.slot.alive:
            self.case, self.died, self.since = self.cases.popleft(), False, time.monotonic()
            settings, client = self.arena.settings, self.arena.client
            self.task = enqueue_task(self.case.text, queue=self.queue, settings=settings, client=client).id

    def _kill(self) -> None:
        """Its heartbeat beats until then, so the death is noticed by its process alone."""
        assert self.case is not None
        horse, _worker = map(int, self.once.read_text().split())
        if self.case.death == "both":
            self.arena.fleet.kill(self.slot, then=horse)
        else:
            with suppress(ProcessLookupError):
                os.kill(horse, signal.SIGKILL)
        self.died = True


def run_matrix(home: Path, tools: str, script: Path | None, show: Show) -> list[Line]:
    """Raises EnvironmentFailed, InvalidInput. Tells each line as soon as it is known."""
    probes = probes_of(tools, script)
    turns = [{"match": rf" {probe.tool}$", "turns": [{"calls": [probe.call]}, {"text": "done"}]} for probe in probes]
    with open_arena(home, {"scripts": turns}, tools or OWN_TOOLS) as arena:
        lanes = [Lane(arena, label, deque(_cases(label, probes))) for label in POINTS]
        for number in range(1, SWEEPERS + 1):
            arena.fleet.add(f"sweeper-{number}", "sweeper")
        await_workers(arena, len(lanes))
        lines = []
        for case, task, died in _over(arena, lanes):
            lines.append(judge_line(case.label, case.probe, case.death, died, _facts(arena, task, case.text)))
            show.say(lines[-1].text)
    order = list(POINTS)
    return sorted(lines, key=lambda line: (order.index(line.label), line.probe.tool, line.death))


def _cases(label: str, probes: Sequence[Probe]) -> Iterator[Case]:
    """All deaths of horses first: they leave the worker alive."""
    return (Case(label, probe, death) for death in DEATHS for probe in probes)


def _over(arena: Arena, lanes: Sequence[Lane]) -> Iterator[tuple[Case, str, bool]]:
    while any(lane.busy for lane in lanes):
        arena.fleet.pump()
        for lane in lanes:
            try:
                over = lane.step()
            except RedisUnavailable as error:
                raise EnvironmentFailed(f"the drill's own server is away: {error}") from error
            if over:
                yield over
        time.sleep(TICK_S)


def _facts(arena: Arena, task: str, text: str) -> TaskFacts:
    (facts,) = task_facts(arena, {task: text})
    return facts
