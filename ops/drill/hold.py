"""Holding a drill: the same tasks without kills and with them, then the verdict."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.drill.arena import LEASE_MS, Arena, open_arena
from ops.drill.collect import collect
from ops.drill.facts import Facts
from ops.drill.fleet import EnvironmentFailed
from ops.drill.plan import FIRST_S, GAP_S, KINDS, LONG_OUTAGES, Kill, schedule, spread
from ops.drill.run import PATIENCE_S, SECONDS_MAX, Run, await_workers
from ops.drill.script import default_script, own_script, task_text
from ops.drill.show import Show
from ops.drill.verdict import Verdict, judge

OWN_TOOLS = "ops.drill.tools"
SWEEPERS = 2


@dataclass(frozen=True)
class Options:
    """What the command line says. `tools` and `script`: the user's own; both empty for the drill's."""

    tasks: int = 60
    workers: int = 3
    seconds: float = 30
    kinds: tuple[str, ...] = ()
    seed: int = 1
    turns: int = 10
    tools: str = ""
    script: Path | None = None
    control: bool = True
    gap_s: tuple[float, float] = GAP_S
    first_s: float = FIRST_S
    long_outages: float = LONG_OUTAGES
    lease_ms: int = LEASE_MS
    patience_s: float = PATIENCE_S
    style: Mapping[str, Any] = field(default_factory=dict)  # of the drill's own script
    sabotage: str = ""
    worker_class: str = "fork"
    forget_s: float = 0.0  # a killed server comes back without what it was told for so long before

    def source(self) -> dict[str, Any] | Path:
        """The script to play. Raises InvalidInput."""
        if self.script is None:
            return default_script(self.seed, self.turns, **self.style)
        own_script(self.script)
        return self.script

    def command_line(self) -> str:
        """What gives the same schedule again."""
        if self.sabotage:
            return f"baton drill --sabotage {self.sabotage} --seed {self.seed}"
        usual = Options()
        said = {
            "--tasks": (self.tasks, usual.tasks),
            "--workers": (self.workers, usual.workers),
            "--seconds": (f"{self.seconds:g}", f"{usual.seconds:g}"),
            "--turns": (self.turns, usual.turns),
            "--kill": (",".join(self.kinds), ",".join(KINDS)),
            "--worker-class": (self.worker_class, usual.worker_class),
            "--tools": (self.tools, usual.tools),
            "--script": (self.script, usual.script),
        }
        options = [f"{name} {shlex.quote(str(value))}" for name, (value, default) in said.items() if value != default]
        return " ".join(["baton drill", f"--seed {self.seed}", *options])

    @property
    def expected(self) -> str:
        """How tasks end: the drill's own script always ends well; what a user's does is the user's affair."""
        return "" if self.script else "succeeded"

    def kills(self) -> list[Kill]:
        return schedule(
            self.seed,
            self.seconds,
            self.kinds,
            lease_s=self.lease_ms / 1000,
            gap_s=self.gap_s,
            first_s=self.first_s,
            long_outages=self.long_outages,
        )


@dataclass(frozen=True)
class Outcome:
    """A drill that is over."""

    verdict: Verdict
    facts: Facts


def hold(home: Path, options: Options, show: Show) -> Outcome:
    """Raises EnvironmentFailed, InvalidInput."""
    source = options.source()
    tools = options.tools or OWN_TOOLS
    kind = {"sabotage": options.sabotage, "worker_class": options.worker_class}
    with open_arena(home, source, tools, lease_ms=options.lease_ms, **kind) as arena:
        people(arena, options.workers)
        control = None
        if options.control:
            show.say("First the same tasks without kills, to compare with.")
            control = judge(_run(arena, "control", options, (), show))
        show.say(f"Now with kills: seed {options.seed}, {', '.join(options.kinds)}.")
        facts = _run(arena, "kills", options, options.kills(), show)
    return Outcome(judge(facts, control), facts)


def people(arena: Arena, workers: int) -> None:
    """Fork the fleet and wait until it listens."""
    for number in range(1, workers + 1):
        arena.fleet.add(f"worker-{number}", "worker")
    for number in range(1, SWEEPERS + 1):
        arena.fleet.add(f"sweeper-{number}", "sweeper")
    await_workers(arena, workers)


def _run(arena: Arena, name: str, options: Options, kills: Sequence[Kill], show: Show) -> Facts:
    times = spread(options.seed, options.tasks, options.seconds)
    tasks = [(task_text(name, number), at) for number, at in enumerate(times)]
    # Two seconds a turn is many times what a turn takes; it only has to end some time.
    most = SECONDS_MAX + options.seconds + 2.0 * options.tasks * options.turns
    run = Run(arena, name, tasks, kills, show, options.patience_s, most, options.forget_s)
    seconds = run.hold()
    run.killer.let_all_go_on()
    if kills and not run.killer.hits:
        raise EnvironmentFailed("nothing was killed: the tasks ended too soon; give it more --tasks or --turns")
    return collect(run, seconds, options.expected)
