"""The verdict: guarantees checked and broken, counts, recovery times. Pure over the facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ops.drill.check import Broken
from ops.drill.conversation import results_given
from ops.drill.facts import Event, Facts, Hit, Json, TaskFacts
from ops.drill.guarantees import CHECKS, TITLES

EXAMPLES_MAX = 5
SINCE_BACK = "redis, since it was back"


@dataclass(frozen=True)
class Guarantee:
    """One line of the verdict."""

    number: int
    checked: int
    unit: str
    broken: tuple[Broken, ...]

    @property
    def title(self) -> str:
        return TITLES[self.number]

    def document(self) -> Json:
        examples = [vars(one) for one in self.broken[:EXAMPLES_MAX]]
        about = {"number": self.number, "guarantee": self.title, "unit": self.unit}
        return {**about, "checked": self.checked, "broken": len(self.broken), "examples": examples}


@dataclass(frozen=True)
class Spread:
    """Recovery times after one kind of death, in seconds from the kill to the next claim of the same task."""

    number: int
    hit: int  # tasks that were hit so: the others had just ended, went on in the same hands, or were hit again
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True)
class Verdict:
    """`control`: the same run without kills."""

    guarantees: tuple[Guarantee, ...]
    counts: dict[str, int]
    recovery: dict[str, Spread] = field(default_factory=dict)
    seconds: float = 0.0
    requests: int = 0
    control: Verdict | None = None

    @property
    def holds(self) -> bool:
        return not self.broken and (self.control is None or self.control.holds)

    @property
    def broken(self) -> tuple[int, ...]:
        """Numbers of the broken guarantees."""
        return tuple(one.number for one in self.guarantees if one.broken)

    def overhead(self) -> Json | None:
        """What the kills cost: time and model requests, against the run without."""
        if self.control is None or not self.control.seconds:
            return None
        return {
            "seconds": round(self.seconds, 2),
            "secondsWithoutKills": round(self.control.seconds, 2),
            "requests": self.requests,
            "requestsWithoutKills": self.control.requests,
        }

    def document(self) -> Json:
        return {
            "ok": self.holds,
            "guarantees": [one.document() for one in self.guarantees],
            "counts": self.counts,
            "recoverySeconds": {kind: vars(spread) for kind, spread in self.recovery.items()},
            "overhead": self.overhead(),
            "withoutKills": None if self.control is None else self.control.document(),
        }


def judge(facts: Facts, control: Verdict | None = None) -> Verdict:
    """What can be said of a run."""
    guarantees = []
    for number, check in CHECKS.items():
        found = check(facts)
        guarantees.append(Guarantee(number, found.checked, found.unit, tuple(found.broken)))
    requests = sum(len(task.requests) for task in facts.tasks)
    counts = _counts(facts, len(guarantees[0].broken))
    return Verdict(tuple(guarantees), counts, recovery_times(facts), facts.seconds, requests, control)


def _counts(facts: Facts, duplicated: int) -> dict[str, int]:
    ends = Counter(task.status for task in facts.tasks)
    decided = Counter(
        str(decision).partition(":")[0]
        for task in facts.tasks
        for event in task.events
        if event.kind == "answered"
        for decision in event.data.get("decisions", {}).values()
    )
    told = Counter(event.kind for task in facts.tasks for event in task.events)
    return {
        "tasks": len(facts.tasks),
        **{status: ends[status] for status in ("succeeded", "failed", "cancelled", "dead")},
        "lost": sum(not task.ended for task in facts.tasks),
        "kills": len(facts.hits),
        "recovered": told["recovered"],
        "redelivered": told["redelivered"],
        "calls": decided.total(),
        "duplicated": duplicated,
        "unknown": sum(result.is_unknown for task in facts.tasks for result in results_given(task)),
        "reused": decided["reuse"],
        "rerun": sum(map(_reruns, facts.tasks)),
        "verified": sum(map(_asked, facts.tasks)),
        "held": told["resolved"],
        "paidTwice": sum(max(0, task.paid - task.turns) for task in facts.tasks),
    }


def _reruns(task: TaskFacts) -> int:
    """From the effect log: a read-only call that is run again is decided as "run"."""
    harmless = (line for line in task.effects if line["what"] == "began" and line["effect"] != "side_effect")
    runs = Counter((line["turn"], line["call"]) for line in harmless)
    return sum(runs.values()) - len(runs)


def _asked(task: TaskFacts) -> int:
    """From the effect log, too: what an attempt decided is told only if it came as far as point B."""
    return len({(line["turn"], line["call"]) for line in task.effects if line["what"] == "asked"})


def recovery_times(facts: Facts) -> dict[str, Spread]:
    """By kind of death, for tasks that were really hit: taken from their holder after the kill."""
    tasks = {task.id: task for task in facts.tasks}
    waits: dict[str, list[float]] = {}
    struck: Counter[str] = Counter()
    for hit in facts.hits:
        for task_id in hit.tasks:
            for kind in (hit.kind, *([SINCE_BACK] if hit.kind == "redis" else [])):
                struck[kind] += 1
                waits.setdefault(kind, [])
            if (task := tasks.get(task_id)) and (wait := _wait(task, hit, facts.hits)) is not None:
                waits.setdefault(hit.kind, []).append(wait)
                if hit.kind == "redis" and hit.until is not None:  # the outage is the drill's doing, not ours
                    waits.setdefault(SINCE_BACK, []).append(max(0.0, wait - (hit.until - hit.at)))
    return {kind: _spread(found, struck[kind]) for kind, found in sorted(waits.items())}


def _wait(task: TaskFacts, hit: Hit, hits: Sequence[Hit]) -> float | None:
    """None if the hit missed (the task had just ended or moved on), or something else happened before it went on."""
    at_ms = hit.at * 1000
    after = [event for event in task.events if event.at_ms >= int(at_ms)]
    taken = _first(after, "recovered")
    if taken is None or any(event.kind == "claimed" for event in after[: after.index(taken)]):
        return None
    claimed = _first(after[after.index(taken) :], "claimed")
    if claimed is None or any(_meddles(other, hit, task.id, claimed.at_ms / 1000) for other in hits):
        return None
    return max(0.0, (claimed.at_ms - at_ms) / 1000)


def _meddles(other: Hit, hit: Hit, task: str, claimed_at: float) -> bool:
    """Another hit on the task, or the server's absence, fell into the time that is measured."""
    if other is hit or other.at >= claimed_at:
        return False
    if other.kind == "redis":
        return (other.until or other.at) > hit.at
    return other.at > hit.at and task in other.tasks


def _first(events: Sequence[Event], kind: str) -> Event | None:
    return next((event for event in events if event.kind == kind), None)


def _spread(waits: Sequence[float], hit: int) -> Spread:
    ordered = sorted(waits) or [0.0]

    def rank(share: float) -> float:
        """The smallest wait that at least this share of all does not exceed."""
        return round(ordered[max(0, -(-len(ordered) * int(share * 100) // 100) - 1)], 3)

    return Spread(len(waits), hit, rank(0.5), rank(0.99), round(ordered[-1], 3))
