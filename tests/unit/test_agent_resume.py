"""What a new holder does with what the dead one left: the three situations, and the cases that went wrong elsewhere.

Case numbers (A01 …) are those of the project's collection of real failures.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.agents import Answer, Bench, Died, T, calls, say, use
from worker.answers import STATE_UNKNOWN, Answers
from worker.crashpoints import POINTS
from worker.errors import ToolFailure
from worker.reconcile import Decision
from worker.state.codec import digest
from worker.state.ledger import Call, Entry
from worker.state.server import FixedProbe
from worker.state.task import Status
from worker.tools import Tool, ToolResult, tool

SEND = use("send", line="a")
SENT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "did send a"}
UNKNOWN = {"type": "tool_result", "tool_use_id": "toolu_1", "content": STATE_UNKNOWN, "is_error": True}


def started(*steps: Any, **options: Any) -> Bench:
    bench = Bench(*steps, **options)
    bench.enqueue()
    return bench


def dead_at(label: str, n: int = 1, *steps: Any, **options: Any) -> Bench:
    """A task whose holder died at the n-th passing of a point; queued again, not yet taken up."""
    bench = started(*(steps or (calls(SEND), say())), **options)
    with bench.dying((label, n)), pytest.raises(Died):
        bench.deliver()
    bench.take_over()
    return bench


# -- the three situations ------------------------------------------------------------------------------------------


def test_with_nothing_pending_the_model_is_asked_at_once() -> None:
    bench = dead_at("after-save-b")
    assert len(bench.model.log) == 1
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send a"]
    assert len(bench.model.log) == 2
    assert bench.model.bodies[1]["messages"] == bench.messages()[:3]


def test_a_read_only_call_that_was_cut_off_is_run_again() -> None:
    bench = dead_at("after-effect", 1, calls(use("look", line="a")), say())
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["look a", "look a"]
    assert bench.results() == [{**SENT, "content": "did look a"}]


def test_a_side_effect_that_was_cut_off_is_reported_as_unknown_and_never_run_again() -> None:
    """B02: the effect is there, its record is not."""
    bench = dead_at("after-effect")
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send a"]
    assert bench.results() == [UNKNOWN]
    assert "may or may not have taken effect" in STATE_UNKNOWN
    bench.check()


def test_a_call_without_a_start_marker_never_started_and_is_run() -> None:
    """A01, with more than plain checkpointing can know: the call's result is a real one."""
    bench = dead_at("after-save-a")
    assert bench.effects == []
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send a"]
    assert bench.results() == [SENT]
    bench.check()


def test_a_recorded_result_is_used_and_the_call_not_run() -> None:
    bench = dead_at("after-effect-write")
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send a"]
    assert bench.results() == [SENT]


def test_a_missing_marker_proves_nothing_on_a_server_that_was_replaced() -> None:
    """F04: a failover may have lost the marker, so the call that never ran is reported as unknown."""
    bench = dead_at("after-save-a")
    bench.probe = FixedProbe("promoted replica")
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == []
    assert bench.results() == [UNKNOWN]


def test_a_missing_marker_counts_on_a_restarted_server_that_loses_nothing() -> None:
    """The control: every write is persisted before it is acknowledged."""
    bench = dead_at("after-save-a")
    bench.probe = FixedProbe("restarted", durable=True)
    assert bench.run() is Status.SUCCEEDED
    assert bench.results() == [SENT]


def test_distrust_of_markers_ends_with_the_calls_it_was_about() -> None:
    bench = dead_at("after-save-a", 1, calls(SEND), calls(use("send", 2, line="b")), say())
    bench.probe = FixedProbe("promoted replica")
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send b"]


def test_the_outcome_is_saved_before_the_model_is_asked_again() -> None:
    """A01: point B of the reconcile comes first, whatever the model then does."""
    bench = dead_at("after-effect", 1, calls(SEND), [Died("at the model"), say()])
    with pytest.raises(Died):
        bench.deliver()
    assert bench.results() == [UNKNOWN]
    assert bench.checkpoint().pending == ()


# -- recording before running --------------------------------------------------------------------------------------


class RecordsFirst(Answers):
    """The order that must not be: the ledger says "done" before it is."""

    def _run(self, call: Call, tool: Tool, decision: Decision) -> ToolResult:
        self.store.mark_started(self.holder, call)
        promised = Entry(call.name, digest(call.input), "did send a", False, self.holder.epoch)
        self.store.record_result(self.holder, call, promised)
        raise Died("between the record and the call")


class RunsFirst(Answers):
    """The control dies at the same place of the order as it is."""

    def _record(self, call: Call, result: ToolResult, decision: Decision) -> ToolResult:
        raise Died("between the call and the record")


@pytest.mark.parametrize(
    ("order", "effects", "result"),
    [
        pytest.param(RecordsFirst, [], SENT, id="records first"),
        pytest.param(RunsFirst, ["send a"], UNKNOWN, id="runs first"),
    ],
)
def test_recording_before_running_would_turn_a_death_into_a_result_that_never_was(
    monkeypatch: pytest.MonkeyPatch, order: type[Answers], effects: list[str], result: dict[str, Any]
) -> None:
    bench = started(calls(SEND), say())
    with monkeypatch.context() as patch:
        patch.setattr("worker.attempt.Answers", order)
        with pytest.raises(Died):
            bench.deliver()
    bench.take_over()
    assert bench.run() is Status.SUCCEEDED
    assert (bench.effects, bench.results()) == (effects, [result])


# -- several calls in one response ---------------------------------------------------------------------------------

THREE = [use("send", n, line=str(n)) for n in (1, 2, 3)]


def test_of_three_calls_the_recorded_is_reused_the_cut_off_unknown_the_third_run() -> None:
    """A02: no result is lost, none is doubled, and what never started is run."""
    bench = dead_at("after-effect", 2, calls(*THREE), say())
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send 1", "send 2", "send 3"]
    assert [block["content"] for block in bench.results()] == ["did send 1", STATE_UNKNOWN, "did send 3"]
    bench.check()


def test_all_results_of_a_round_survive_a_death_right_after_point_b() -> None:
    """A03."""
    bench = dead_at("after-save-b", 1, calls(*(use("look", n, line=str(n)) for n in (1, 2, 3))), say())
    assert bench.run() is Status.SUCCEEDED
    assert [block["content"] for block in bench.model.bodies[1]["messages"][2]["content"]] == [
        "did look 1", "did look 2", "did look 3",
    ]  # fmt: skip
    assert sorted(bench.effects) == ["look 1", "look 2", "look 3"]


def test_a_batch_is_not_run_again_because_its_last_call_was_cut_off() -> None:
    """B01."""
    bench = dead_at("after-effect", 3, calls(*THREE), say())
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send 1", "send 2", "send 3"]
    assert [block.get("is_error", False) for block in bench.results()] == [False, False, True]


def test_an_unknown_outcome_stays_unknown_through_further_deaths() -> None:
    """B12: a second resume does not find a call that looks as if it could be tried."""
    bench = started(calls(SEND), say(), crashes_in_row_max=9)
    assert bench.run(("after-effect", 1), ("after-claim", 2), ("after-save-b", 1)) is Status.SUCCEEDED
    assert bench.task().crashes == 3
    assert bench.effects == ["send a"]
    assert bench.results() == [UNKNOWN]


def test_a_death_at_every_point_in_turn_ends_as_the_run_without_one() -> None:
    """B09: the resume enters at reconcile, not at the top of the turn."""
    rounds = [calls(use("post", n, line=str(n))) for n in (1, 2, 3)]
    control = started(*rounds, say())
    assert control.run() is Status.SUCCEEDED
    bench = started(*rounds, say(), crashes_in_row_max=99)
    assert bench.run(*((label, n) for n, label in enumerate(POINTS, 1) if label != "before-finish")) is Status.SUCCEEDED
    assert bench.task().crashes >= 3
    assert bench.effects == control.effects
    assert bench.documents() == control.documents()


def test_a_tool_that_failed_before_a_death_has_failed_after_it_and_the_rest_goes_on() -> None:
    """E13, A04: a recorded failure is a result like any other, one for its call; only end_turn ends the task."""

    @tool
    def burn(line: str) -> str:
        bench.world.did("burn", line)
        raise ToolFailure("it went up in flames")

    rounds = (calls(use("burn", 1, line="x")), calls(use("send", 2, line="y")), say("still here"))
    bench = started(*rounds, tools=(burn,))
    assert bench.run(("after-effect-write", 1)) is Status.SUCCEEDED
    assert bench.effects == ["burn x", "send y"]
    assert bench.results()[0] == {**SENT, "content": "it went up in flames", "is_error": True}
    assert bench.results()[1] == {**SENT, "tool_use_id": "toolu_2", "content": "did send y"}
    assert bench.task().result == "still here"


# -- state that is not what it was ---------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["after-save-a", "after-save-b"])
def test_a_lost_checkpoint_fails_the_task_and_never_starts_it_again_from_its_text(label: str) -> None:
    """B15."""
    bench = dead_at(label)
    keys = bench.store.keys
    bench.store.client.delete(keys.checkpoint(T), keys.messages(T))
    assert bench.run() is Status.FAILED
    assert "checkpoint lost" in bench.task().reason
    assert len(bench.model.log) == 1
    assert bench.effects == ([] if label == "after-save-a" else ["send a"])


def test_a_ledger_entry_of_another_call_is_damage_and_not_a_hit() -> None:
    bench = dead_at("after-effect-write")
    other = Entry("send", digest({"line": "another"}), "did send another", False, 1)
    bench.store.client.hset(bench.store.keys.ledger(T), "1:toolu_1", other.dump(0))
    assert bench.run() is Status.FAILED
    assert "of another call" in bench.task().reason
    assert bench.effects == ["send a"]


def test_turns_and_tokens_go_on_counting_over_a_resume() -> None:
    """H14: and the response that was lost before it was saved is not counted."""
    bench = started(calls(SEND), Answer(say().content, usage={"input_tokens": 100, "output_tokens": 1, "new": 2}))
    assert bench.run(("after-model-response", 1), ("after-save-b", 1)) is Status.SUCCEEDED
    assert bench.checkpoint().turns == 2
    assert bench.checkpoint().tokens_used == {"input_tokens": 110, "output_tokens": 6, "new": 2}
    assert bench.checkpoint().total_tokens == 15 + 103
    assert len(bench.model.log) == 3
