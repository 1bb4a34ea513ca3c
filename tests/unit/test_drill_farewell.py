"""What a drill says of workers that were told to go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.drill.facts import Facts, Hit
from ops.drill.verdict import judge
from tests.support.drill_facts import CALL, HISTORY, LAST, TASK, event, events, facts_of, good_task, request, results
from worker.answers import STATE_UNKNOWN

WENT = Hit("term", 10.0, 10, "worker-1", (TASK,), until=12.0, status=0)


def told_to_go(hit: Hit = WENT, *others: Hit, facts: Facts | None = None) -> Facts:
    return replace(facts or facts_of(), hits=(hit, *others), grace_s=5.0)


def said(facts: Facts) -> list[str]:
    return [broken.what for broken in judge(facts).guarantees[6].broken]


def test_a_worker_that_goes_in_time_and_costs_nothing_breaks_nothing() -> None:
    guarantee = judge(told_to_go()).guarantees[6]
    assert (guarantee.checked, guarantee.broken) == (1, ())


@pytest.mark.parametrize(
    ("hit", "words"),
    [
        (replace(WENT, until=None), "still there at the end"),
        (replace(WENT, until=16.0), "took 6.0 s to go, its grace is 5 s"),
        (replace(WENT, status=1 << 8), "exited with 1"),
        (replace(WENT, status=9), "killed by signal 9"),
    ],
    ids=["never", "late", "with an error", "killed"],
)
def test_one_that_does_not_go_as_it_should_is_told(hit: Hit, words: str) -> None:
    assert any(words in what for what in said(told_to_go(hit)))


@pytest.mark.parametrize("kind", ["worker", "stop", "redis"])
def test_what_was_struck_by_something_else_meanwhile_is_not_held_against_it(kind: str) -> None:
    other = Hit(kind, 11.0, 10, "worker-1", (TASK,), until=11.5)
    assert said(told_to_go(replace(WENT, until=30.0, status=9), other)) == []


def test_control_what_struck_another_worker_is_no_excuse() -> None:
    other = Hit("worker", 11.0, 20, "worker-2", (TASK,))
    assert said(told_to_go(replace(WENT, until=30.0), other)) != []


def test_a_farewell_that_counts_as_a_crash_is_told() -> None:
    assert said(told_to_go(facts=facts_of(good_task(crashes=1)))) != []


def test_a_farewell_that_leaves_a_call_unknown_is_told() -> None:
    unknown = [*HISTORY[:2], results(CALL, STATE_UNKNOWN, is_error=True)]
    task = good_task(requests=(request(HISTORY[:1]), request(unknown, LAST)))
    assert any("unknown" in what for what in said(told_to_go(facts=facts_of(task))))


def test_a_turn_that_is_paid_for_again_is_told_unless_the_call_was_abandoned_and_counted() -> None:
    again = good_task(requests=(request(HISTORY[:1]), *good_task().requests))
    assert any("a turn was lost" in what for what in said(told_to_go(facts=facts_of(again))))
    counted = replace(again, events=(*events()[:2], event("handed-over", abandoned=True), *events()[1:]))
    assert said(told_to_go(facts=facts_of(counted))) == []


def test_a_worker_killed_while_it_was_leaving_may_cost_an_answer_and_one_that_left_in_peace_may_not() -> None:
    """Its death counts as a hand-over, not as a crash."""
    again = good_task(requests=(request(HISTORY[:1]), *good_task().requests))
    for told, broken in (({"proof": "its process is gone"}, False), ({"why": "SIGTERM"}, True)):
        task = replace(again, events=(*events()[:2], event("handed-over", **told), *events()[1:]))
        paid = [one.what for one in judge(facts_of(task)).guarantees[4].broken if "paid for" in one.what]
        assert bool(paid) is broken
