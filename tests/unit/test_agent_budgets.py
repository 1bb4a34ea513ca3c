"""Budgets as an attempt goes by them: reserved before each call, settled after it, charged when it was given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.state.fair_share import check_budgets
from tests.support.agents import Bench, T, calls, say, use
from worker.errors import DrainRequested, ModelTransient
from worker.estimate import ANSWER, Estimate
from worker.state.budget import Budget, Open
from worker.state.task import Status

SEND, PUT = calls(use("send", 1, line="a")), calls(use("put", 2, line="b"))
TOKENS = 15  # of one answer of the script
CRASHES = [("after-claim", 1), ("after-model-response", 1), ("after-save-a", 1), ("after-effect", 1),
           ("after-save-b", 1), ("after-model-response", 2), ("before-finish", 1)]  # fmt: skip


def under_budget(*steps: Any, limit: int = 1_000_000) -> Bench:
    bench = Bench(*steps)
    bench.store.set_budget("tag=a", limit, 0)
    bench.enqueue(tags=("a",))
    return bench


def budget(bench: Bench) -> Budget:
    return bench.store.list_budgets()[0]


def test_each_call_is_reserved_before_it_starts_and_settled_by_what_it_used() -> None:
    reserved: list[int] = []

    def look(answer: Any) -> Callable[..., Any]:
        def step(body: Any, watch: Any) -> Any:
            reserved.append(budget(bench).reserved)
            return answer

        return step

    bench = under_budget(look(SEND), look(PUT), look(say("…", "pause_turn")), look(say()))
    assert bench.run() is Status.SUCCEEDED
    assert (budget(bench).used, budget(bench).reserved) == (4 * TOKENS, 0)
    assert reserved[0] > ANSWER, "the request, and something for the answer"
    assert reserved[1] == pytest.approx(TOKENS + ANSWER + 25, abs=25), "the last call, and what was added since"
    assert len(reserved) == 4


def test_control_a_task_with_another_tag_goes_on_and_is_not_counted() -> None:
    bench = Bench(SEND, say())
    bench.store.set_budget("tag=a", 1, 0)
    bench.enqueue(tags=("b",))
    assert bench.run() is Status.SUCCEEDED
    assert (budget(bench).used, budget(bench).reserved) == (0, 0)


@pytest.mark.parametrize("crash", CRASHES, ids=lambda crash: f"{crash[0]}:{crash[1]}")
def test_a_crash_neither_forgets_nor_doubles_what_was_used(crash: tuple[str, int]) -> None:
    """B08: what a dead attempt had reserved is charged at its estimate, for that answer may be paid for."""
    bench = under_budget(SEND, PUT, say())
    charged: list[int] = []
    take_over = bench.take_over

    def take_over_and_note(task_id: str = T) -> Any:
        open_ = Open.load(bench.task().open_budget)
        charged.append(open_.amount if open_ else 0)
        return take_over(task_id)

    bench.take_over = take_over_and_note  # type: ignore[method-assign]
    assert bench.run(crash) is Status.SUCCEEDED
    check_budgets(bench.store)
    assert len(charged) == 1
    assert (charged[0] > 0) == (crash[0] in ("after-model-response", "after-save-b")), "a call could have been made"
    assert budget(bench).used == 3 * TOKENS + charged[0]
    assert budget(bench).reserved == 0


def test_a_task_that_finds_no_room_is_parked_before_its_call_and_goes_on_where_it_stopped() -> None:
    bench = under_budget(SEND, say(), limit=ANSWER + 500)
    bench.store.set_budget("fleet", 10, 0)
    assert bench.run() is Status.PARKED
    assert bench.task().parked.waits_for == "budget:fleet"
    assert (len(bench.model.log), bench.task().crashes, bench.task().wake_at_ms) == (0, 0, None)
    assert bench.store.clear_budget("fleet") == [T]
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send a"]


def test_a_call_that_was_given_up_is_charged_and_one_that_was_refused_is_not() -> None:
    def drained(body: Any, watch: Any) -> Any:
        return DrainRequested("deploy", abandoned=True)

    bench = under_budget([ModelTransient("529"), drained, say()])
    assert bench.run() is Status.PARKED
    assert (budget(bench).used, budget(bench).reserved) == (0, 0)
    bench.store.wake(T)
    assert bench.run() is Status.SUCCEEDED
    assert budget(bench).used > ANSWER
    assert budget(bench).reserved == 0


def test_an_estimate_counts_what_was_added_since_the_last_call() -> None:
    estimate = Estimate({"max_tokens": 100, "system": "s" * 400})
    first = estimate.next_call([{"role": "user", "content": "x" * 4_000}])
    assert 1_200 < first < 1_250
    estimate.learn(5_000, seen=2)
    assert 5_200 < estimate.next_call([{}, {}, {"role": "user", "content": "x" * 400}]) < 5_250
