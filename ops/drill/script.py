"""What the model says in a drill: made from the seed, or a script of the user's own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from ops.script_template import Scripts, load_script
from worker.errors import InvalidInput

VARIANTS = 6  # conversations; tasks take turns with them
TAKES_MS = (5, 60)
THINKS_S = (0.01, 0.05)

# Tool → how often it is called, beside the others. See ops.drill.tools.
CALLED = {"look": 3, "put": 2, "send": 4, "pay": 2}

Json = dict[str, Any]


def default_script(
    seed: int, turns: int, *, called: dict[str, int] = CALLED, takes_ms: tuple[int, int] = TAKES_MS, calls_max: int = 3
) -> Json:
    """`turns` answers each, all but the last with calls of every nature, of which some stand side by side."""
    rng = random.Random(f"{seed}/script")

    def call(name: str, where: str) -> Json:
        return {"name": name, "input": {"item": where, "takes_ms": rng.randint(*takes_ms)}}

    def answer(variant: int, turn: int) -> Json:
        names = rng.choices(list(called), list(called.values()), k=rng.randint(1, calls_max))
        calls = [call(name, f"{variant}.{turn}.{place}") for place, name in enumerate(names, 1)]
        return {"calls": calls, "delay_s": round(rng.uniform(*THINKS_S), 3)}

    def conversation(variant: int) -> Json:
        said = [answer(variant, turn) for turn in range(1, turns)]
        return {"match": rf" way {variant}$", "turns": [*said, {"text": "{{ results_all | length }} calls answered"}]}

    return {"scripts": [conversation(variant) for variant in range(VARIANTS)]}


def task_text(phase: str, number: int) -> str:
    """The text of a task: names it, and chooses its conversation. No two are the same, so the model's log can be read
    task by task."""
    return f"drill {phase} task {number} way {number % VARIANTS}"


def own_script(path: Path) -> Scripts:
    """The user's script, checked. Raises InvalidInput, also if it has nothing to say to a drill's tasks."""
    scripts = load_script(path)
    for way in range(VARIANTS):
        text = task_text("kills", way)
        if scripts.find({"messages": [{"role": "user", "content": text}]}) is None:
            raise InvalidInput(f"No script in {path} matches the text of a drill's task, which is {text!r}.")
    return scripts
