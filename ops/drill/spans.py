"""Who worked on what, and when: ownerships as spans of time, for the picture."""

from __future__ import annotations

from dataclasses import dataclass

from ops.drill.facts import Facts


@dataclass(frozen=True)
class Span:
    """One ownership: seconds after `zero`. `end`: how it ended, "ended", "recovered" or "other"."""

    task: str
    slot: str
    start_s: float
    end_s: float
    end: str


ENDS = {"ended": "ended", "recovered": "recovered", "parked": "other", "handed-over": "other"}


def spans(facts: Facts, zero: float) -> list[Span]:
    """In order of their starts. An ownership whose worker nobody saw (too short) is on no row and is left out."""
    seen = {(task, epoch): slot for task, epoch, _, slot in facts.owners}
    found = []
    for task in facts.tasks:
        slots = seen | _told(task.id, task.effects, facts)
        start = epoch = 0
        for event in task.events:
            if event.kind == "claimed":
                start, epoch = event.at_ms, event.data["epoch"]
            elif event.kind in ENDS and start:
                if slot := slots.get((task.id, epoch)):
                    times = (start / 1000 - zero, event.at_ms / 1000 - zero)
                    found.append(Span(task.id, slot, *times, ENDS[event.kind]))
                start = 0
    return sorted(found, key=lambda span: span.start_s)


def _told(task: str, effects: tuple[dict[str, object], ...], facts: Facts) -> dict[tuple[str, int], str]:
    """The effect log knows the workers of those whom no look has met."""
    slots = dict(facts.workers)
    found = {}
    for line in effects:
        if slot := slots.get(int(str(line.get("worker", 0)))):
            found[task, int(str(line["epoch"]))] = slot
    return found
