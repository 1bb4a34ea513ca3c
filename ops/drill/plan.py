"""When to kill what: a pure function of the seed.

A kill is due at its time and hits whoever is working then. So a seed gives the same times, kinds, choices and pauses
again, and not the same pids.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# What is killed → how often it is drawn, beside the others.
KINDS = {"worker": 4, "horse": 5, "both": 4, "stop": 2, "redis": 2, "sweeper": 2, "job": 2, "term": 2}
OF_HORSES = frozenset({"horse", "both"})  # which only workers that fork have
CLASSES = ("fork", "thread", "stock")

ABOUT = {
    "worker": "SIGKILL of the rq worker alone; its work-horse dies with it",
    "horse": "SIGKILL of the work-horse alone",
    "both": "SIGKILL of the worker and, in the same moment, of its work-horse",
    "stop": "SIGSTOP of the work-horse past its lease, then SIGCONT",
    "redis": "SIGKILL of the server, started again after a short pause or one longer than the lease",
    "sweeper": "SIGKILL of a sweeper",
    "term": "SIGTERM of an rq worker, one at a time: it hands its tasks over and ends",
    "job": "no kill: an RQ job is lost from the queue, or put on it once more",
}

# For --help: the keys of sabotage_drill.DRILLS.
SABOTAGES = ("fence", "marker", "ledger", "order", "sweeper", "seq", "drain")

FIRST_S = 1.0
GAP_S = (0.5, 1.3)
OUTAGE_S = (0.05, 0.6)
LONG_OUTAGES = 0.3  # of those of the server, the share that is longer than the lease


@dataclass(frozen=True)
class Kill:
    """Due `at_s` seconds after the start. `pick` chooses among those who are working then; `pause_s` is how long the
    process stays stopped, or the server away."""

    at_s: float
    kind: str
    pick: int
    pause_s: float = 0.0


def schedule(
    seed: int,
    seconds: float,
    kinds: Sequence[str],
    *,
    lease_s: float,
    gap_s: tuple[float, float] = GAP_S,
    first_s: float = FIRST_S,
    long_outages: float = LONG_OUTAGES,
) -> list[Kill]:
    """The kills of a drill. Every kind comes once before any comes twice, if there is time."""
    rng = random.Random(f"{seed}/kills")
    drawn = _drawn(rng, kinds)
    kills: list[Kill] = []
    at = first_s * rng.uniform(0.5, 1.5)
    while kinds and at < seconds:
        kind = next(drawn)
        pause = _pause(rng, kind, lease_s, long_outages)
        kills.append(Kill(round(at, 3), kind, rng.randrange(1_000_000), round(pause, 3)))
        # Nothing works while the server is away, so there would be nobody to kill.
        at += rng.uniform(*gap_s) + (pause if kind == "redis" else 0)
    return kills


def spread(seed: int, tasks: int, seconds: float) -> list[float]:
    """When each task is enqueued, in seconds after the start: half of them at once, the others while it goes on; a
    handful all at once."""
    rng = random.Random(f"{seed}/tasks")
    later = sorted(rng.uniform(0, seconds / 2) for _ in range(tasks // 2)) if tasks > 4 else []
    return [0.0] * (tasks - len(later)) + [round(at, 3) for at in later]


def _drawn(rng: random.Random, kinds: Sequence[str]) -> Iterator[str]:
    once = list(kinds)
    rng.shuffle(once)
    yield from once
    while True:
        bag = [kind for kind in kinds for _ in range(KINDS[kind])]
        rng.shuffle(bag)
        yield from bag


def _pause(rng: random.Random, kind: str, lease_s: float, long_outages: float) -> float:
    if kind == "stop":
        return lease_s + rng.uniform(1.0, 2.0)
    if kind != "redis":
        return 0.0
    long = rng.random() < long_outages
    return lease_s + rng.uniform(0.3, 1.0) if long else rng.uniform(*OUTAGE_S)
