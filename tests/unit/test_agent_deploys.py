"""A deploy between a death and the resume: tools vanish, parameters change, settings differ."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.agents import Bench, Died, calls, say, use
from worker.answers import STATE_UNKNOWN
from worker.state.task import Status
from worker.tools import tool

SEND = use("send", line="a")


def dead_at(label: str, *steps: Any) -> Bench:
    """A task whose holder died at a crash point; queued again, not yet taken up."""
    bench = Bench(*(steps or (calls(SEND), say())))
    bench.enqueue()
    with bench.dying((label, 1)), pytest.raises(Died):
        bench.deliver()
    bench.take_over()
    return bench


def without(bench: Bench, name: str) -> None:
    bench.tools = [tool for tool in bench.tools if tool.name != name]


def test_a_tool_that_vanished_is_answered_and_the_task_goes_on() -> None:
    """A15: nothing had started, so the model is told that there is no such tool, and which there are."""
    bench = dead_at("after-save-a")
    without(bench, "send")
    assert bench.run() is Status.SUCCEEDED
    (result,) = bench.results()
    assert result["is_error"] is True
    assert result["content"] == "There is no tool called 'send'. The tools are: look, post, put, wire."
    assert bench.task().attempts == 2
    assert bench.model.bodies[0]["tools"] == bench.model.bodies[1]["tools"], "the prefix stays as it was frozen"
    bench.check()


def test_a_tool_that_vanished_while_it_may_have_run_leaves_the_outcome_unknown() -> None:
    bench = dead_at("after-effect")
    without(bench, "send")
    assert bench.run() is Status.SUCCEEDED
    assert [block["content"] for block in bench.results()] == [STATE_UNKNOWN]


@pytest.mark.parametrize(("label", "told"), [("after-effect", STATE_UNKNOWN), ("after-save-a", "does not fit")])
def test_a_call_whose_input_no_longer_fits_is_not_said_to_have_never_run_if_it_may_have(label: str, told: str) -> None:
    """A deploy narrowed the tool's parameters between a death and the resume."""
    bench = dead_at(label, calls(use("put", line="a")), say())

    @tool(effect="idempotent")
    def put(page: int) -> str:
        return bench.world.did("put", str(page))

    without(bench, "put")
    bench.tools.append(put)
    assert bench.run() is Status.SUCCEEDED
    (result,) = bench.results()
    assert result["is_error"] is True
    assert told in result["content"]
    assert bench.effects == (["put a"] if label == "after-effect" else [])


def test_the_request_prefix_is_the_frozen_one_whatever_the_next_worker_is_set_to() -> None:
    """G10: another model, prompt or tool text after a deploy would cost the prompt cache, and bind no thinking."""
    bench = dead_at("after-save-b")
    bench.settings = bench.settings.model_copy(update={"model": "newer", "system": "Be brief.", "max_tokens": 7})
    bench.tools = [tool for tool in bench.tools if tool.name == "send"]
    assert bench.run() is Status.SUCCEEDED
    bench.check()
    first, second = bench.model.bodies
    assert {**first, "messages": 0} == {**second, "messages": 0}
