"""The drill for each sabotage: what to kill, and with what tasks, so that the missing protection surely shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ops.drill.hold import Options, Outcome, hold
from ops.drill.show import Show
from ops.drill.verdict import Verdict

SEND_SLOWLY = {"called": {"send": 1}, "takes_ms": (150, 250), "calls_max": 1}
SIDE_BY_SIDE = {"called": {"send": 3, "put": 1, "look": 1}, "takes_ms": (60, 140), "calls_max": 4}
LONG_CALLS = {"called": {"send": 1, "look": 1}, "takes_ms": (150, 400), "calls_max": 1}


@dataclass(frozen=True)
class Recipe:
    """`breaks`: the guarantee that has to come out broken; `sign`: words that its examples hold then, where the way of
    killing alone breaks it too (a server that forgets makes fools of the best protected holders)."""

    about: str
    breaks: int
    options: dict[str, Any]
    sign: str = ""

    def shows_in(self, verdict: Verdict) -> bool:
        """The verdict has noticed what is missing."""
        broken = [
            one for guarantee in verdict.guarantees if guarantee.number == self.breaks for one in guarantee.broken
        ]
        return any(self.sign in one.what for one in broken)


DRILLS = {
    "fence": Recipe(
        "holders do not look whether they still are holders",
        5,
        {"kinds": ("stop",), "tasks": 3, "workers": 5, "seconds": 4, "turns": 20, "lease_ms": 900},
    ),
    "marker": Recipe(
        "no start markers",
        1,
        {"kinds": ("horse", "both"), "tasks": 4, "seconds": 4, "turns": 6, "gap_s": (0.2, 0.4), "style": SEND_SLOWLY},
    ),
    "ledger": Recipe(
        "recorded results are not found again",
        2,
        {"kinds": ("horse", "both"), "tasks": 4, "seconds": 4, "turns": 10, "gap_s": (0.2, 0.4), "style": SIDE_BY_SIDE},
    ),
    "order": Recipe(
        "results are recorded before the call runs",
        2,
        {"kinds": ("horse",), "tasks": 3, "seconds": 3, "turns": 15, "first_s": 0.5},
    ),
    "sweeper": Recipe(
        "nobody hands on the tasks of the dead",
        4,
        {"kinds": ("both",), "tasks": 4, "seconds": 3, "turns": 8, "patience_s": 3.0},
    ),
    "seq": Recipe(
        "a server that has forgotten steps is believed",
        5,
        {
            "kinds": ("redis",),
            "tasks": 3,
            "seconds": 4,
            "turns": 12,
            "lease_ms": 8_000,
            "first_s": 2.5,
            "gap_s": (1.0, 1.5),
            "long_outages": 0.0,
            "style": LONG_CALLS,
            "forget_s": 0.8,
        },
        sign="are counted",
    ),
    "drain": Recipe(
        "workers that are told to go do not tell their tasks",
        7,
        {"kinds": ("term",), "tasks": 4, "workers": 2, "seconds": 3, "turns": 8},
    ),
}


def sabotaged(home: Path, name: str, seed: int, show: Show) -> tuple[Outcome, Options]:
    """Hold the drill of this sabotage. Raises EnvironmentFailed."""
    recipe = DRILLS[name]
    options = replace(Options(seed=seed, control=False, sabotage=name), **recipe.options)
    show.say(f"Sabotage: {recipe.about}. Guarantee {recipe.breaks} has to break.")
    outcome = hold(home, options, show)
    noticed = recipe.shows_in(outcome.verdict)
    show.say("The drill noticed." if noticed else f"NOT noticed: guarantee {recipe.breaks} came out whole.")
    return outcome, options
