"""What the scripted model says in fleet and crash tests, by kind of task."""

from __future__ import annotations

from typing import Any

READ, PUT = {"name": "read", "input": {"name": "news"}}, {"name": "put", "input": {"name": "shelf"}}
APPEND, PAY = {"name": "append", "input": {"text": "line"}}, {"name": "pay", "input": {"item": "bill"}}
HELD = {"name": "append", "input": {"text": "line", "hold": True}}
DONE = {"text": "done"}
SECOND = {"name": "append", "input": {"text": "second"}}


def _round(number: int) -> dict[str, Any]:
    """A turn of which a good part is the model's and a good part the side effect's, so that random kills hit both."""
    line = {"text": f"line {number}", "takes_s": 0.1}
    return {
        "calls": [{"name": "read", "input": {"name": f"page {number}"}}, {"name": "append", "input": line}],
        "delay_s": 0.1,
    }


# The kind of a task is the first word of its text.
SCRIPTS: dict[str, list[dict[str, Any]]] = {
    "all": [{"text": "Four calls.", "calls": [READ, PUT, APPEND, PAY]}, DONE],
    "short": [{"calls": [APPEND]}, DONE],
    "held": [{"calls": [HELD]}, DONE],
    "rounds": [_round(1), _round(2), _round(3), DONE],
    "two": [{"calls": [HELD, SECOND]}, DONE],
    "tools": [{"calls": [HELD, SECOND, READ, PUT]}, {"calls": [PAY]}, DONE],
    "starved": [{"calls": [{"name": "hog", "input": {"text": "line"}}, SECOND]}, DONE],
    "patient": [{"calls": [{"name": "hog", "input": {"text": "line", "keeps_gil": False}}, SECOND]}, DONE],
    "spawns": [{"calls": [{"name": "spawn", "input": {"text": "line"}}]}, DONE],
    "leaves": [{"calls": [{"name": "background", "input": {"text": "line"}}]}, DONE],
    "many": [*map(_round, range(1, 9)), DONE],
    "ten": [*map(_round, range(1, 11)), DONE],
    "hangs": [{"calls": [APPEND]}, {**DONE, "fault": {"kind": "hang"}}],
    "ponders": [{"calls": [{"name": "ponder", "input": {"text": "it"}}]}, DONE],
    "slow": [{"calls": [APPEND]}, {**DONE, "delay_s": 2.5}],
    "poison": [{"calls": [{"name": "explode", "input": {"name": "bomb"}}]}, DONE],
    "told": [{**DONE, "fault": {"status": 429, "headers": {"retry-after": "2"}, "message": "slow down"}}],
    "asks": [DONE],
    "once-refused": [{**DONE, "fault": {"status": 400, "message": "not today"}}],
    "refused": [{"fault": {"status": 400, "message": "this request is not to the API's taste", "times": 99}}],
}
