"""A worker that is told to go: the check of a drain, a pure function of the facts like those of `guarantees`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ops.drill.check import Broken, Check
from ops.drill.conversation import results_given
from ops.drill.facts import Facts, Hit, TaskFacts

LATE_S = 0.5  # from the end of a process to our hearing of it, on a loaded machine


def farewells_cost_nothing(facts: Facts) -> Check:
    check = Check("farewells")
    terms = [hit for hit in facts.hits if hit.kind == "term"]
    for hit in terms:
        if undisturbed(hit, facts):
            problem = "; ".join(problems_of_leaving(hit, facts))
            check.look(", ".join(hit.tasks) or "none", not problem, problem)
    if terms and len(terms) == len(facts.hits):
        for task in facts.tasks:
            check.broken += [Broken(task.id, what, call) for what, call in problems_of_drained(task)]
    return check


def problems_of_leaving(hit: Hit, facts: Facts) -> Iterator[str]:
    """`hit`: a worker was told to go."""
    if hit.until is None:
        yield f"{hit.slot} (pid {hit.pid}) was told to go and was still there at the end"
        return
    took = hit.until - hit.at
    if took > facts.grace_s + LATE_S:
        yield f"{hit.slot} (pid {hit.pid}) took {took:.1f} s to go, its grace is {facts.grace_s:g} s"
    if hit.status != 0:
        yield f"{hit.slot} (pid {hit.pid}) {_ended(hit.status or 0)} when it was told to go"


def problems_of_drained(task: TaskFacts) -> Iterator[tuple[str, str]]:
    """Of a run in which workers were told to go and nothing worse happened: what the task has lost, and its call."""
    if task.crashes:
        yield f"{task.crashes} crashes are counted, and there were only farewells", ""
    for result in results_given(task):
        if result.is_unknown:
            yield "a farewell left the outcome of a call unknown", result.call
    abandoned = sum(event.kind == "handed-over" and bool(event.data.get("abandoned")) for event in task.events)
    if task.paid > task.turns + task.parks + abandoned:
        yield f"{task.paid} answers were paid for, for {task.turns} turns: a turn was lost", ""


def undisturbed(hit: Hit, facts: Facts) -> bool:
    """Nothing else happened to the worker, or to the server, while it was leaving."""
    until = hit.until or float("inf")
    for other in facts.hits:
        if other is hit:
            continue
        if other.kind == "redis" and other.at < until and (other.until or float("inf")) > hit.at:
            return False
        if other.slot == hit.slot and other.kind not in ("job", "term") and hit.at - facts.grace_s < other.at < until:
            return False
    return True


def _ended(status: int) -> str:
    return f"was killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exited with {status >> 8}"
