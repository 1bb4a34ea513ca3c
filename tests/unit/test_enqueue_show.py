"""Words for a person; text of models and tools cannot take the terminal over."""

from __future__ import annotations

from typing import Any

import pytest

from enqueue.plain import duration, one_line, plain
from enqueue.show import Narrator, ending
from worker.state.views import Event

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31mred\x1b[0m\x08\x7f\r\u202egnp\u2066\U000e0041[bold]x[/bold]\ud800"


def told(narrator: Narrator, kind: str, **data: Any) -> list[str]:
    return narrator.lines(Event("1-0", kind, 1_000_000, data))


def line(kind: str, **data: Any) -> str:
    (only,) = told(Narrator(), kind, **data)
    return only


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("created", {"delivery": 1}, "accepted and queued"),
        ("created", {"reason": "waits", "wakeAtMs": 1_300_000}, "accepted; starts in 5 min"),
        ("claimed", {"attempt": 1, "epoch": 1}, "started by attempt 1"),
        ("claimed", {"attempt": 2, "epoch": 3}, "resumed by attempt 2 (epoch 3)"),
        ("call-started", {"turn": 1, "call": "t1", "name": "read"}, "read: started"),
        ("call-recorded", {"turn": 1, "call": "t1", "name": "read", "isError": False, "decision": "run"}, "read: done"),
        (
            "call-recorded",
            {"turn": 1, "call": "t1", "name": "read", "isError": True, "decision": "rerun"},
            "read: failed, the model is told (run again: a repetition does no harm)",
        ),
        ("parked", {"reason": "no key", "wakeAtMs": 1_030_000}, "put aside for 30 s: no key"),
        ("parked", {"reason": "ask me", "wakeAtMs": None}, "put aside until a person decides: ask me"),
        (
            "parked",
            {"reason": "waits for one of the 5 places of k", "wakeAtMs": 1_600_000, "waitsFor": "slot:k"},
            "put aside until it is its turn: waits for one of the 5 places of k",
        ),
        ("woken", {"delivery": 2}, "its time has come; queued again"),
        ("handed-over", {"delivery": 2, "why": "drain"}, "handed over to another worker: drain"),
        (
            "handed-over",
            {"delivery": 2, "why": "drain", "abandoned": True},
            "handed over to another worker: drain (a model call was given up for it)",
        ),
        ("handed-over", {"delivery": 2, "proof": "its horse"}, "handed over to another worker: its horse"),
        ("handed-over", {"proof": "stopped in RQ"}, "let go of: stopped in RQ"),
        (
            "recovered",
            {"proof": "its process 123 on host is gone", "crashes": 1, "epoch": 1, "delivery": 2},
            "worker died (its process 123 on host is gone); the task is queued again",
        ),
        (
            "recovered",
            {"proof": "its lease ran out", "crashes": 3, "epoch": 1},
            "worker died (its lease ran out); the task is not queued again",
        ),
        ("redelivered", {"delivery": 3}, "its job was lost from the queue; queued again"),
        ("retried", {"by": "ann", "delivery": 3}, "queued again by ann"),
        ("cancel-asked", {"by": "ann"}, "asked to stop by ann"),
        ("ended", {"status": "succeeded", "reason": "end_turn"}, "succeeded"),
        ("ended", {"status": "failed", "reason": "limit: 40 turns"}, "failed: limit: 40 turns"),
        ("new-in-a-later-version", {"a": 1}, 'new-in-a-later-version {"a": 1}'),
        ("claimed", {}, "claimed {}"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_event_is_a_line(kind: str, data: dict[str, Any], said: str) -> None:
    assert line(kind, **data) == said


def test_a_response_tells_its_calls_and_what_it_says() -> None:
    answer = {
        "turn": 2,
        "stopReason": "tool_use",
        "tokens": 321,
        "tries": 3,
        "text": "let me\nsee",
        "calls": ["a", "b"],
    }
    assert told(Narrator(), "responded", **answer) == [
        "turn 2: the model calls a, b (321 tokens, 3 tries)",
        "turn 2: it says: let me see",
    ]
    end = {**answer, "calls": [], "stopReason": "end_turn", "tries": 1, "text": ""}
    assert told(Narrator(), "responded", **end) == ["turn 2: the model ended with end_turn (321 tokens)"]


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        ("reuse", "write_report: ledger hit, result reused, not run again"),
        ("unknown", "write_report: state unknown, not run again"),
        ("hold", "write_report: state unknown, waits for a person's decision"),
    ],
)
def test_a_resumed_call_is_called_by_the_name_it_had_before_the_crash(decision: str, said: str) -> None:
    narrator = Narrator()
    told(narrator, "call-started", turn=3, call="t1", name="write_report")
    assert told(narrator, "answered", turn=3, decisions={"t1": decision, "t2": "run"})[0] == said


def test_the_same_id_in_another_turn_is_another_call() -> None:
    narrator = Narrator()
    told(narrator, "call-started", turn=1, call="t1", name="first")
    assert told(narrator, "answered", turn=2, decisions={"t1": "unknown"})[0] == "t1: state unknown, not run again"


def test_hostile_text_loses_its_teeth_everywhere() -> None:
    narrator = Narrator()
    events: list[tuple[str, dict[str, Any]]] = [
        ("responded", {"turn": 1, "stopReason": HOSTILE, "tokens": 1, "text": HOSTILE, "calls": [HOSTILE]}),
        ("responded", {"turn": 1, "stopReason": HOSTILE, "tokens": 1, "text": "", "calls": []}),
        ("call-started", {"turn": 1, "call": HOSTILE, "name": HOSTILE}),
        ("answered", {"turn": 1, "decisions": {HOSTILE: "reuse", HOSTILE + "2": "unknown"}}),
        ("parked", {"reason": HOSTILE, "wakeAtMs": None}),
        ("ended", {"status": "failed", "reason": HOSTILE}),
        (HOSTILE, {HOSTILE: HOSTILE}),
    ]
    for kind, data in events:
        for shown in told(narrator, kind, **data):
            assert shown.isprintable(), repr(shown)


def test_plain_text_keeps_what_is_text() -> None:
    assert plain(HOSTILE) == "redgnp[bold]x[/bold]"
    assert plain("one\r\ntwo\tthree\u2028four") == "one\ntwo\tthree\nfour"
    assert plain("日本語 ß 👩‍👩‍👧 é") == "日本語 ß 👩‍👩‍👧 é"
    assert plain("\x1b]52;c;ZXZpbA==\x1b\\safe \x1bPq#0\x1b\\\x1b(Bend") == "safe end"


def test_one_line_is_one_line_and_has_an_end() -> None:
    assert one_line(" a\n\n b ") == "a b"
    assert one_line("x" * 500, 10) == "x" * 9 + "…"
    assert one_line(" " * 5_000 + "x", 10).endswith("…")


@pytest.mark.parametrize(
    ("seconds", "said"), [(-5, "0 s"), (0.4, "0 s"), (119, "119 s"), (600, "10 min"), (9_000, "2 h"), (400_000, "5 d")]
)
def test_durations_are_short(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_an_end_says_why_unless_that_goes_without_saying() -> None:
    assert (ending("succeeded", "end_turn"), ending("dead", "crashed")) == ("succeeded", "dead: crashed")
    assert (ending("cancelled", "ann"), ending("cancelled", "")) == ("cancelled by ann", "cancelled by somebody")
