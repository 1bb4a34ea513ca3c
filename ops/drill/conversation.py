"""What the model was told, read from its own log; and what the effect log says of the same calls."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ops.drill.effects import fingerprint
from ops.drill.facts import Json, TaskFacts
from ops.transcript import blocks_of, check_log
from worker.answers import STATE_UNKNOWN

# Taken from a holder that may live on: one request of its may be on its way, or still to come.
TAKEN_ALIVE = ("its lease ran out", "its connection")


@dataclass(frozen=True)
class Result:
    """One tool_result. `content` is its fingerprint with whether it is an error, as in `Calls.returned`."""

    turn: int
    call: str
    content: tuple[str, bool]
    is_error: bool
    is_unknown: bool


@dataclass(frozen=True)
class Calls:
    """By `turn:call`: which began, what runs and `verify` returned, which were recorded in the ledger."""

    began: frozenset[str]
    returned: dict[str, set[tuple[str, bool]]]
    recorded: frozenset[str]


def calls_of(task: TaskFacts) -> Calls:
    began: set[str] = set()
    returned: dict[str, set[tuple[str, bool]]] = defaultdict(set)
    for line in task.effects:
        name = f"{line['turn']}:{line['call']}"
        if line["what"] == "began":
            began.add(name)
        elif line["what"] == "did":
            returned[name].add((line["content"], line["isError"]))
        elif line["outcome"] == "happened":
            returned[name].add((line["content"], False))
    recorded = (event.data for event in task.events if event.kind == "call-recorded")
    return Calls(frozenset(began), dict(returned), frozenset(f"{data['turn']}:{data['call']}" for data in recorded))


def results_given(task: TaskFacts) -> list[Result]:
    """Those in the longest request that the model got; a task that was never answered after a call has none."""
    return list(_results(_longest(task)))


def _results(messages: list[Json]) -> Iterator[Result]:
    turn = 0
    for message in messages:
        if message["role"] == "assistant":
            turn += 1
            continue
        for block in blocks_of(message, "tool_result"):
            is_error = bool(block.get("is_error"))
            content = block.get("content", "")
            unknown = is_error and content == STATE_UNKNOWN
            yield Result(turn, block["tool_use_id"], (fingerprint(content), is_error), is_error, unknown)


def problems_of_requests(task: TaskFacts) -> list[str]:
    return check_log(in_order(task))


def in_order(task: TaskFacts) -> list[Json]:
    """The task's requests, those put back that came late from a holder whose task had been taken while it lived. Each
    such taking excuses one; and it must be, as check_log sees, byte for byte what was asked before."""
    taken = sum(
        event.kind == "recovered" and str(event.data.get("proof", "")).startswith(TAKEN_ALIVE) for event in task.events
    )
    kept: list[Json] = []
    for line in task.requests:
        length = len(line["body"]["messages"])
        place = len(kept)
        while place and len(kept[place - 1]["body"]["messages"]) > length:
            place -= 1
        if place < len(kept):
            if taken <= 0:
                place = len(kept)
            taken -= 1
        kept.insert(place, line)
    return kept


def stored_as_asked(task: TaskFacts) -> str:
    """What is stored must begin with what the model was asked with; the problem in words, "" if there is none."""
    asked = _longest(task)
    stored = list(task.messages[: len(asked)])
    if not task.ended or not asked or not stored:
        return ""
    for number, (here, there) in enumerate(zip(stored, asked, strict=False)):
        if json.dumps(here) != json.dumps(there):
            return f"message {number} as stored is not what the model was asked with"
    return (
        f"{len(stored)} messages are stored, the model was asked with {len(asked)}" if len(stored) < len(asked) else ""
    )


def _longest(task: TaskFacts) -> list[Json]:
    bodies = [line["body"]["messages"] for line in task.requests]
    return max(bodies, key=len, default=[])
