"""Each guarantee's check on facts made by hand: whole on what went well, broken by one thing at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ops.drill.facts import Event, Facts, Hit, Outage
from ops.drill.verdict import judge
from tests.support.drill_facts import (
    ASKED,
    CALL,
    HISTORY,
    LAST,
    NEXT,
    TASK,
    effect,
    event,
    events,
    facts_of,
    good_task,
    happened,
    request,
    results,
    used,
)
from worker.answers import STATE_UNKNOWN

UNKNOWN = [*HISTORY[:2], results(CALL, STATE_UNKNOWN, is_error=True)]
STOPPED = Hit("stop", 0.5, 11, "worker-1", (TASK,))


def with_events(*found: Event, **changes: Any) -> Facts:
    return facts_of(good_task(events=found, **changes))


def without(kind: str, **data: Any) -> list[Event]:
    """The good task's events but those of a kind (and data)."""
    return [one for one in events() if one.kind != kind or any(one.data.get(k) != v for k, v in data.items())]


def after(kind: str, *more: Event) -> list[Event]:
    """The good task's events, with `more` put behind the first of a kind."""
    place = next(number for number, one in enumerate(events()) if one.kind == kind) + 1
    return [*events()[:place], *more, *events()[place:]]


def unknown_task(*, recorded: bool) -> Facts:
    """Its only call was reported as unknown."""
    history = [*UNKNOWN, LAST]
    told = [event("call-recorded", turn=1, call=CALL)] if recorded else []
    found = [
        event("claimed", epoch=1),
        event("responded", turn=1, tokens=15),
        event("call-started", turn=1, call=CALL),
        *told,
        event("recovered", proof="its process 11 is gone"),
        event("claimed", epoch=3),
        event("answered", turn=1, decisions={CALL: "unknown"}),
        event("responded", turn=2, tokens=15),
        event("ended", status="succeeded", reason="end_turn"),
    ]
    entry = {"epoch": 1}
    return facts_of(
        good_task(
            events=tuple(found),
            messages=tuple(history),
            message_count=4,
            turns=2,
            total_tokens=30,
            tokens_used=used(2),
            crashes=1,
            attempts=2,
            ledger={f"1:{CALL}": entry} if recorded else {},
            requests=(request([ASKED]), request(UNKNOWN, LAST)),
            effects=(effect("began"),),
        )
    )


def refused_task(expected: str) -> Facts:
    """Its only call has an error for a result, and never began."""
    history = [*HISTORY[:2], results(CALL, "item: Field required", is_error=True)]
    task = good_task(
        requests=(request([ASKED]), request(history, LAST)),
        effects=(),
        world=(),
        messages=(*history, LAST),
        message_count=4,
        turns=2,
        total_tokens=30,
        tokens_used=used(2),
        ledger={},
        started={},
        events=(
            event("claimed", epoch=1),
            event("responded", turn=1, tokens=15),
            event("answered", turn=1, decisions={CALL: "run"}),
            event("responded", turn=2, tokens=15),
            event("ended", status="succeeded"),
        ),
    )
    return facts_of(task, expected=expected)


def other_tokens() -> Facts:
    """Counted without a contradiction, but not what the model's answer says."""
    found = [Event(one.kind, one.at_ms, one.data | {"tokens": 14}) if "tokens" in one.data else one for one in events()]
    return facts_of(good_task(events=tuple(found), total_tokens=42, tokens_used={"input_tokens": 42}))


DENIED = (*good_task().effects[:2], effect("asked", outcome="not_happened"), *good_task().effects[2:])

BROKEN: dict[str, tuple[int, Facts]] = {
    "a side effect ran twice": (1, facts_of(good_task(effects=(*good_task().effects, effect("began", epoch=3))))),
    "it ran again though verify could not tell": (
        1,
        facts_of(good_task(effects=(*good_task().effects, effect("asked", outcome="unknown"), effect("began")))),
    ),
    "a second key": (
        1,
        facts_of(
            good_task(
                effects=(*good_task().effects, effect("began", NEXT, 2, effect="read_only", tool="look", key="other"))
            )
        ),
    ),
    "one key twice in the world": (1, facts_of(good_task(world=(happened(), happened())))),
    "verify denies a run that had returned": (1, facts_of(good_task(effects=DENIED))),
    "an error for a call that never began": (2, refused_task("succeeded")),
    "a result of a call that never returned": (
        2,
        facts_of(good_task(effects=tuple(line for line in good_task().effects if line["what"] != "did"))),
    ),
    "another result than the call's": (
        2,
        facts_of(good_task(effects=(effect("began"), effect("did", content="other"), *good_task().effects[2:]))),
    ),
    "reported as unknown though it was recorded": (2, unknown_task(recorded=True)),
    "recorded twice": (
        2,
        with_events(*after("call-recorded", event("call-recorded", turn=1, call=CALL))),
    ),
    "a call without its result": (
        3,
        facts_of(good_task(requests=(*good_task().requests[:2], request([*HISTORY[:4], ASKED])), messages=())),
    ),
    "history rewritten": (
        3,
        facts_of(
            good_task(requests=(request([ASKED]), request([{**ASKED, "content": "x"}, *HISTORY[1:3]])), effects=()),
            expected="",
        ),
    ),
    "a task that never ended": (4, facts_of(good_task(status="running", events=tuple(without("ended"))))),
    "a task that is gone": (4, facts_of(good_task(status=""))),
    "ended twice": (4, with_events(*events(), event("ended", status="succeeded"))),
    "ended without a reason": (4, facts_of(good_task(reason=""))),
    "ended otherwise than without kills": (4, facts_of(good_task(status="failed", reason="damaged: x"))),
    "a result that the model never gave": (4, facts_of(good_task(result="something else"))),
    "found damaged, whatever was expected": (
        4,
        facts_of(good_task(status="failed", reason="damaged: x"), expected=""),
    ),
    "a turn saved twice": (5, with_events(*after("answered", event("responded", turn=1, tokens=0)), turns=4)),
    "results saved twice": (5, with_events(*after("answered", event("answered", turn=1, decisions={})))),
    "an epoch that goes back": (5, with_events(*after("answered", event("claimed", epoch=1)))),
    "a result written by a fenced holder": (
        5,
        facts_of(good_task(ledger={f"1:{CALL}": {"epoch": 1}, f"2:{NEXT}": {"epoch": 3}})),
    ),
    "a marker written by a fenced holder": (5, facts_of(good_task(started={f"1:{CALL}": {"epoch": 7}}))),
    "turns counted twice": (5, facts_of(good_task(turns=4))),
    "tokens lost": (5, facts_of(good_task(total_tokens=30))),
    "other tokens than the model's log has": (5, other_tokens()),
    "tokens that are not the sum of the counters": (5, facts_of(good_task(tokens_used=used(2)))),
    "written while nobody held the task": (5, with_events(*after("call-started", event("recovered", proof="gone")))),
    "an answer paid for twice without a crash": (
        5,
        facts_of(good_task(requests=(request([ASKED]), *good_task().requests))),
    ),
    "a message missing": (5, facts_of(good_task(messages=(*HISTORY[:3], *HISTORY[4:], LAST)))),
    "a message that the model was never told": (
        5,
        facts_of(good_task(messages=(*HISTORY[:2], results(CALL, "x"), *HISTORY[3:], LAST))),
    ),
    "a call begun by a fenced holder": (
        5,
        facts_of(
            good_task(
                effects=(
                    *(line | {"epoch": 3} for line in good_task().effects[:2]),
                    *(line | {"mono": 2.0} for line in good_task().effects[2:]),
                )
            )
        ),
    ),
    "a task forgotten over a crash of the server": (6, facts_of(outages=(Outage(1, {TASK: "the task itself"}),))),
}


def test_nothing_is_to_be_said_of_a_run_in_which_all_went_well() -> None:
    verdict = judge(facts_of(outages=(Outage(1),)))
    assert verdict.holds
    assert verdict.broken == ()
    assert [one.checked for one in verdict.guarantees] == [1, 2, 3, 1, 9, 1, 0]


@pytest.mark.parametrize("name", BROKEN)
def test_one_thing_that_went_wrong_breaks_the_guarantee_it_belongs_to(name: str) -> None:
    number, facts = BROKEN[name]
    verdict = judge(facts)
    assert not verdict.holds
    assert number in verdict.broken
    (guarantee,) = (one for one in verdict.guarantees if one.number == number)
    assert guarantee.broken[0].task == TASK
    assert set(verdict.broken) - {number} <= ALSO.get(name, set())


# What cannot go wrong alone: a history without a result is not what the model was asked with either.
ALSO = {
    "a call without its result": {2, 5},
    "history rewritten": {2, 4, 5},
    "ended twice": {5},
    "a turn saved twice": {5},
    "a side effect ran twice": {5},
    "recorded twice": {5},
}


def test_a_call_may_run_again_where_verify_said_that_it_had_not_happened() -> None:
    again = (effect("began"), effect("asked", outcome="not_happened"), effect("began"), effect("did"))
    assert judge(facts_of(good_task(effects=(*again, *good_task().effects[2:])))).holds


def test_a_read_only_call_may_run_as_often_as_it_likes() -> None:
    more = effect("began", NEXT, 2, tool="look", effect="read_only")
    assert judge(facts_of(good_task(effects=(*good_task().effects, more)))).holds


def test_what_verify_told_is_a_real_result() -> None:
    asked = (effect("began"), effect("asked", outcome="happened", content=effect("did")["content"]))
    assert judge(facts_of(good_task(effects=(*asked, *good_task().effects[2:])))).holds


def test_a_call_that_may_have_run_may_be_reported_as_unknown_and_is_counted() -> None:
    verdict = judge(unknown_task(recorded=False))
    assert verdict.holds
    assert (verdict.counts["unknown"], verdict.counts["recovered"]) == (1, 1)


def test_an_error_for_a_call_that_never_began_needs_no_run_where_nobody_knows_the_script() -> None:
    """With one's own script a call may be refused before it can run."""
    assert judge(refused_task("")).holds


def test_a_request_that_met_an_outage_of_the_model_was_not_paid_for() -> None:
    refused = request([ASKED], status=529, fault="529", response=None)
    assert judge(facts_of(good_task(requests=(refused, *good_task().requests)))).holds


def late(proof: str) -> Facts:
    """The request of a holder whose task had been taken arrived after one of its successor."""
    found = after("answered", event("recovered", proof=proof), event("claimed", epoch=3))
    first, second, third = good_task().requests
    entries = {f"1:{CALL}": {"epoch": 1}, f"2:{NEXT}": {"epoch": 3}}
    return facts_of(good_task(events=tuple(found), crashes=1, requests=(first, second, third, second), ledger=entries))


def test_one_late_request_is_excused_where_the_holder_was_not_known_to_be_dead() -> None:
    """A process frozen between its last look at the lease and the socket sends when it wakes up."""
    assert judge(late("its lease ran out")).holds


def test_a_late_request_of_a_dead_process_is_a_broken_conversation() -> None:
    assert judge(late("its process 11 on host is gone")).broken == (3,)


def test_a_late_request_that_was_never_asked_before_is_a_broken_conversation() -> None:
    facts = late("its lease ran out")
    (task,) = facts.tasks
    other = request([{**ASKED, "content": "something else"}, *HISTORY[1:3]])
    changed = replace(task, requests=(*task.requests[:3], other))
    assert 3 in judge(replace(facts, tasks=(changed,))).broken


def test_a_process_that_was_stopped_just_before_a_call_cannot_know_that_it_is_fenced() -> None:
    """It is not guaranteed that it does not run the call: only that it runs it once and writes nothing."""
    _, facts = BROKEN["a call begun by a fenced holder"]
    assert judge(replace(facts, hits=(STOPPED,))).holds


def test_a_call_that_a_stopped_process_finishes_later_may_happen_again_where_verify_was_asked_before() -> None:
    """What verify said was right when it was asked; a process let go on in the middle of a call cannot be held back."""
    again = (effect("began"), effect("asked", outcome="not_happened"), effect("began", pid=12), effect("did", pid=12))
    task = good_task(effects=(*again, *good_task().effects[2:]), world=(happened(), happened()))
    assert judge(facts_of(task)).broken == (1,)
    assert judge(facts_of(task, hits=(STOPPED,))).holds
