"""Facts of drills, made by hand: a task that went well, and ways to change it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ops.drill.effects import fingerprint
from ops.drill.facts import Event, Facts, TaskFacts

TASK, CALL, NEXT = "task-1", "toolu_send", "toolu_look"
SENT = "a is sent"
ASKED: dict[str, Any] = {"role": "user", "content": "drill kills task 0 way 0"}
TOKENS = 15

Json = dict[str, Any]


def answer(call: str, name: str) -> Json:
    return {"role": "assistant", "content": [{"type": "tool_use", "id": call, "name": name, "input": {"item": "a"}}]}


def results(call: str, content: str, **more: Any) -> Json:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": content, **more}]}


def request(messages: list[Json], said: Json | None = None, **more: Any) -> Json:
    """A line of the model's log: it answered, with what the good task was told in that turn or with `said`."""
    turn = sum(message["role"] == "assistant" for message in messages)
    content = (said or (HISTORY[1], HISTORY[3], LAST)[turn])["content"]
    stop = "end_turn" if content[-1]["type"] == "text" else "tool_use"
    body = {"model": "m", "max_tokens": 10, "messages": messages}
    response = {"content": content, "stop_reason": stop, "usage": {**used(1), "cache_read_input_tokens": None}}
    return {"body": body, "status": 200, "fault": None, "response": response, **more}


def used(turns: int) -> Json:
    """The counters after so many turns."""
    return {"input_tokens": 10 * turns, "output_tokens": (TOKENS - 10) * turns}


def happened(call: str = CALL, tool: str = "send") -> Json:
    """A line of what the drill's tools did to the world."""
    return {"tool": tool, "task": TASK, "call": call, "key": f"key-{call}"}


def effect(what: str, call: str = CALL, turn: int = 1, **more: Any) -> Json:
    """A line of the effect log."""
    known: Json = {"what": what, "task": TASK, "turn": turn, "call": call, "tool": "send", "effect": "side_effect"}
    told: Json = {"key": f"key-{call}", "epoch": 1, "pid": 11, "worker": 10, "mono": 1.0, "at": 1.0}
    found = {"content": fingerprint(SENT), "isError": False} if what == "did" else {}
    return {**known, **told, **found, **more}


def event(kind: str, **data: Any) -> Event:
    return Event(kind, int(data.pop("at_ms", 1_000)), data)


HISTORY = [
    ASKED,
    answer(CALL, "send"),
    results(CALL, SENT),
    answer(NEXT, "look"),
    results(NEXT, SENT),
]
LAST = {"role": "assistant", "content": [{"type": "text", "text": "done"}]}


def events() -> list[Event]:
    """Of a task of three turns, one holder, no crash."""
    return [
        event("created"),
        event("claimed", attempt=1, epoch=1),
        event("responded", turn=1, tokens=TOKENS),
        event("call-started", turn=1, call=CALL, name="send"),
        event("call-recorded", turn=1, call=CALL, name="send", isError=False),
        event("answered", turn=1, decisions={CALL: "run"}),
        event("responded", turn=2, tokens=TOKENS),
        event("call-recorded", turn=2, call=NEXT, name="look", isError=False),
        event("answered", turn=2, decisions={NEXT: "run"}),
        event("responded", turn=3, tokens=TOKENS),
        event("ended", status="succeeded", reason="end_turn", at_ms=2_000),
    ]


def good_task(**changes: Any) -> TaskFacts:
    """A task about which nothing is to be said."""
    task = TaskFacts(
        id=TASK,
        text=str(ASKED["content"]),
        status="succeeded",
        reason="end_turn",
        attempts=1,
        turns=3,
        total_tokens=3 * TOKENS,
        tokens_used=used(3),
        result="done",
        message_count=6,
        events=tuple(events()),
        messages=(*HISTORY, LAST),
        ledger={f"1:{CALL}": {"epoch": 1}, f"2:{NEXT}": {"epoch": 1}},
        started={f"1:{CALL}": {"epoch": 1}},
        requests=tuple(request(HISTORY[:length]) for length in (1, 3, 5)),
        effects=(
            effect("began"),
            effect("did"),
            effect("began", NEXT, 2, tool="look", effect="read_only"),
            effect("did", NEXT, 2, tool="look", effect="read_only"),
        ),
        world=(happened(),),
    )
    return replace(task, **changes)


def facts_of(*tasks: TaskFacts, **more: Any) -> Facts:
    return Facts(tasks or (good_task(),), **{"expected": "succeeded", **more})
