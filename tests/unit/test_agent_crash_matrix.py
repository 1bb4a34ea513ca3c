"""Die at every crash point, at every passing of it, with every kind of tool: what must be the same afterwards is.

The crash-free run is the control of each case.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.agents import Bench, calls, say, use
from worker.answers import STATE_UNKNOWN
from worker.state.task import Status

PASSINGS = {
    "after-claim": 1,
    "after-model-response": 3,
    "after-save-a": 3,
    "after-start-mark": 4,
    "after-effect": 4,
    "after-effect-write": 4,
    "after-save-b": 2,
    "before-finish": 1,
}
CUT_OFF = ("after-start-mark", "after-effect")  # the points between a call's marker and its record
NATURES = ("look", "put", "send", "post", "post, cannot tell", "wire")
CASES = [
    pytest.param(nature, label, n, id=f"{label}:{n}-{nature}")
    for nature in NATURES
    for label, count in PASSINGS.items()
    for n in range(1, count + 1)
    if (nature, label) != ("look", "after-start-mark")
]


def bench_for(nature: str, **options: Any) -> Bench:
    """Three calls in the first response, one in the second, then the end."""
    name, _, blind = nature.partition(",")
    blocks = [use(name, n, line=str(n)) for n in (1, 2, 3, 4)]
    bench = Bench(calls(*blocks[:3]), calls(blocks[3]), say("all done"), **options)
    bench.world.can_tell = not blind
    bench.enqueue()
    return bench


@cache
def crash_free(nature: str) -> Bench:
    bench = bench_for(nature)
    assert bench.run() is Status.SUCCEEDED
    bench.check()
    return bench


@pytest.mark.parametrize("nature", NATURES)
def test_without_a_crash_each_call_runs_once_and_each_point_is_passed_as_the_cases_say(nature: str) -> None:
    control = crash_free(nature)
    expected = {label: n for label, n in PASSINGS.items() if (nature, label) != ("look", "after-start-mark")}
    assert control.passed == expected
    assert sorted(control.effects) == [f"{nature.partition(',')[0]} {n}" for n in (1, 2, 3, 4)]
    assert len(control.model.log) == 3
    assert control.task().result == "all done"


@pytest.mark.parametrize(("nature", "label", "n"), CASES)
def test_a_death_changes_nothing_but_what_nobody_can_know(nature: str, label: str, n: int) -> None:
    control, bench = crash_free(nature), bench_for(nature)
    status = bench.run((label, n))
    bench.check()
    assert bench.task().crashes == 1
    unknown = label in CUT_OFF and nature in ("send", "post, cannot tell", "wire")
    check_effects(nature, label, n, bench, control)
    if unknown and nature == "wire":
        check_held(bench, n, status)
        return
    assert status is Status.SUCCEEDED
    assert bench.task().result == "all done"
    check_conversation(bench, control, n if unknown else None)
    assert len(bench.model.log) == 3 + (label == "after-model-response"), "one response, at most, is paid for twice"
    assert bench.deliver(delivery=bench.task().delivery) == "nothing to do: the task is succeeded"


def check_effects(nature: str, label: str, n: int, bench: Bench, control: Bench) -> None:
    name = nature.partition(",")[0]
    ran = Counter(bench.effects)
    expected = Counter(control.effects)
    if label == "after-start-mark" and nature in ("send", "post, cannot tell"):
        del expected[f"{name} {n}"]  # it never ran, nobody can know, and so it is not run
    if label in CUT_OFF and nature == "wire":
        expected = Counter({f"wire {i}": 1 for i in range(1, n + (label == "after-effect"))})
    if nature == "look":  # may run again, each of those that ran side by side
        assert ran.keys() == expected.keys()
        assert max(ran.values()) <= 2
    elif nature == "put":
        again = [line for line, count in ran.items() if count > 1]
        assert ran.keys() == expected.keys()
        assert again == ([f"put {n}"] if label == "after-effect" else [])
        assert all(len(keys) == 1 for keys in bench.world.keys.values()), "each run of a call has the same key"
        assert bench.world.keys.keys() == control.world.keys.keys()
    else:
        assert ran == expected


def check_conversation(bench: Bench, control: Bench, unknown: int | None) -> None:
    now, before = bench.checkpoint(), control.checkpoint()
    assert (now.turns, now.tokens_used, now.total_tokens) == (before.turns, before.tokens_used, before.total_tokens)
    if unknown is None:
        assert bench.documents() == control.documents()
        return
    for number, (block, same) in enumerate(zip(bench.results(), control.results(), strict=True), 1):
        told = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": STATE_UNKNOWN, "is_error": True}
        assert block == (told if number == unknown else same)


def check_held(bench: Bench, n: int, status: Status) -> None:
    assert status is Status.PARKED
    assert bench.task().wake_at_ms is None
    assert bench.task().reason.startswith(f"needs a person: nobody knows whether wire (call toolu_{n})")
    pending = [4] if n == 4 else [1, 2, 3]
    assert [call.id for call in bench.checkpoint().pending] == [f"toolu_{number}" for number in pending]
    assert len(bench.model.log) == (2 if n == 4 else 1)


# -- any number of deaths ------------------------------------------------------------------------------------------

DEATHS = st.lists(st.tuples(st.sampled_from(sorted(PASSINGS)), st.integers(1, 12)), max_size=12, unique=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(deaths=DEATHS, can_tell=st.booleans())
def test_after_any_series_of_deaths_no_side_effect_has_happened_twice_and_no_result_is_made_up(
    deaths: list[tuple[str, int]], can_tell: bool
) -> None:
    blocks = [use(name, f"{n}{name}", line=f"{n}") for n in (1, 2) for name in ("look", "send", "put", "post")]
    bench = Bench(calls(*blocks[:5]), calls(*blocks[5:]), say(), crashes_in_row_max=1000, crashes_max=1000)
    bench.world.can_tell = can_tell
    bench.enqueue()
    assert bench.run(*deaths) is Status.SUCCEEDED
    bench.check()
    assert bench.task().crashes <= len(deaths)
    ran = Counter(bench.effects)
    for block, result in zip(blocks, bench.results(), strict=True):
        line = f"{block['name']} {block['input']['line']}"
        assert ran[line] <= 1 or block["name"] in ("look", "put")
        if "is_error" in result:
            assert result["content"] == STATE_UNKNOWN
            assert block["name"] == "send" or (block["name"] == "post" and not can_tell)
        else:
            assert result["content"] == f"did {line}"
            assert ran[line] >= 1
    assert bench.checkpoint().turns == 3
    assert bench.checkpoint().total_tokens == 45
    paid_again = sum(label == "after-model-response" for label, _ in deaths)
    assert len(bench.model.log) <= 3 + paid_again
