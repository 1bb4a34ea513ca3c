"""Tasks that have to wait: for the model, for a person, for a capable worker. None of it is a crash."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.agents import Bench, Died, T, calls, say, use
from worker.errors import ModelConfig, ModelTransient
from worker.state.standing import text
from worker.state.task import Status
from worker.tools import ToolDefinitionError

SEND = use("send", line="a")
DOWN = ModelTransient("overloaded")


def parked_for_s(bench: Bench) -> float:
    """Deliver once more; how long the task is parked for then."""
    if bench.status() is Status.PARKED:
        assert bench.store.wake(T)
    bench.deliver()
    assert bench.status() is Status.PARKED, bench.task().reason
    wake_at = bench.task().wake_at_ms
    assert wake_at is not None
    return (wake_at - bench.views.now_ms()) / 1000


def about(seconds: float) -> Any:
    return pytest.approx(seconds, rel=0.201)  # 20 % of jitter, and the wake-up is in whole ms


# -- the model is away ---------------------------------------------------------------------------------------------


def test_a_transient_fault_parks_the_task_and_frees_the_worker() -> None:
    bench = Bench([DOWN])
    bench.enqueue()
    assert bench.deliver() == "parked: the model cannot be reached just now: overloaded"
    assert bench.task().reason == "the model cannot be reached just now: overloaded"
    assert not bench.store.client.exists(bench.store.keys.lock(T))
    assert bench.take_over() is None


def test_the_pause_doubles_as_long_as_the_task_does_not_get_on_and_has_an_end() -> None:
    bench = Bench([DOWN], park_max_s=60)
    bench.enqueue()
    assert [parked_for_s(bench) for _ in range(7)] == [about(s) for s in (5, 10, 20, 40, 60, 60, 60)]


def test_the_pause_begins_anew_once_the_task_has_got_on() -> None:
    """Progress in the very attempt that is parked counts: its outage is another one than the last."""
    bench = Bench([DOWN, DOWN, DOWN, calls(SEND)], [DOWN, DOWN, calls(use("send", 2, line="b"))], [DOWN])
    bench.enqueue()
    waits = [parked_for_s(bench) for _ in range(7)]
    assert waits == [about(s) for s in (5, 10, 20, 5, 10, 5, 10)]
    assert bench.effects == ["send a", "send b"]


def test_a_wait_that_the_api_asks_for_is_kept_even_beyond_the_longest_pause_of_our_own() -> None:
    bench = Bench([ModelTransient("slow down", retry_after_s=900), ModelTransient("slow down", retry_after_s=0.1)])
    bench.enqueue()
    assert parked_for_s(bench) == pytest.approx(900, abs=1)
    assert parked_for_s(bench) == about(10), "a shorter wait than ours does not shorten ours"


def test_an_outage_of_any_length_is_no_crash_and_the_task_ends_well() -> None:
    """G01."""
    bench = Bench(calls(SEND), [*[DOWN] * 8, say()])
    bench.enqueue()
    for _ in range(8):
        parked_for_s(bench)
    bench.store.wake(T)
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send a"]
    assert (bench.task().crashes, bench.task().parks) == (0, 8)
    bench.check()


def test_a_pause_names_the_request_by_which_its_owner_can_look_it_up() -> None:
    bench = Bench([ModelTransient("half an answer", request_id="req_7")])
    bench.enqueue()
    bench.deliver()
    assert bench.task().reason.endswith("half an answer (request req_7)")


# -- a person is needed --------------------------------------------------------------------------------------------


def test_a_fault_that_hits_every_task_parks_it_with_a_loud_reason(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench([ModelConfig("401: your key is wrong"), say()])
    bench.enqueue()
    assert parked_for_s(bench) == about(30)
    assert bench.task().reason == "needs a person: 401: your key is wrong"
    loud = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert ["needs-a-person" in record.getMessage() for record in loud] == [True]
    bench.store.wake(T)
    assert bench.run() is Status.SUCCEEDED


def test_an_outage_is_not_reported_as_loud(caplog: pytest.LogCaptureFixture) -> None:
    """The control."""
    bench = Bench([DOWN])
    bench.enqueue()
    bench.deliver()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_broken_tools_module_parks_the_task_and_does_not_fail_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise ToolDefinitionError("tools module x cannot be imported")

    bench = Bench(say())
    bench.enqueue()
    with monkeypatch.context() as patch:
        patch.setattr("tests.support.agents.Toolbox", broken)
        bench.deliver()
    assert bench.status() is Status.PARKED
    assert bench.task().reason == "needs a person: tools module x cannot be imported"
    bench.store.wake(T)
    assert bench.run() is Status.SUCCEEDED


def test_a_held_call_is_held_again_however_often_the_task_is_woken() -> None:
    """Nobody has said what became of it, so nothing may be run or told."""
    bench = Bench(calls(use("wire", line="a")), say())
    bench.enqueue()
    assert bench.run(("after-effect", 1)) is Status.PARKED
    for _ in range(3):
        bench.store.wake(T)
        assert bench.run() is Status.PARKED
    assert bench.task().wake_at_ms is None
    assert bench.effects == ["wire a"]
    assert len(bench.model.log) == 1


def test_calls_before_a_held_one_keep_their_results_and_those_after_it_do_not_run() -> None:
    blocks = [use("look", 1, line="a"), use("wire", 2, line="b"), use("send", 3, line="c")]
    bench = Bench(calls(*blocks), say())
    bench.enqueue()
    assert bench.run(("after-start-mark", 1)) is Status.PARKED
    assert bench.effects == ["look a"]
    assert bench.store.client.hkeys(bench.store.keys.ledger(T)) == [b"1:toolu_1"]


# -- a newer, or a damaged checkpoint ------------------------------------------------------------------------------


def stored(bench: Bench) -> tuple[Any, ...]:
    client, keys = bench.store.client, bench.store.keys
    return client.hgetall(keys.checkpoint(T)), bench.documents(), client.hgetall(keys.ledger(T))


def dead_after_a(*steps: Any) -> Bench:
    bench = Bench(*steps)
    bench.enqueue()
    with bench.dying(("after-save-a", 1)), pytest.raises(Died):
        bench.deliver()
    bench.take_over()
    return bench


def test_a_newer_checkpoint_waits_for_a_capable_worker_and_spends_no_attempt() -> None:
    """E08."""
    bench = dead_after_a(calls(SEND), say())
    checkpoint = bench.store.keys.checkpoint(T)
    bench.store.client.hset(checkpoint, "version", 999)
    before, attempts = stored(bench), bench.task().attempts
    assert [parked_for_s(bench) for _ in range(5)] == [about(60)] * 5
    assert stored(bench) == before
    assert bench.task().attempts == attempts
    assert "checkpoint version 999: this worker reads version 1" in bench.task().reason
    bench.store.client.hset(checkpoint, "version", 1)
    bench.store.wake(T)
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send a"]


@pytest.mark.parametrize("name", ["version", "turns", "pendingToolUse", "messageCount", "tokensUsed"])
@pytest.mark.parametrize("raw", [b"", b"\x00" * 10, b"[", b"-1"], ids=["empty", "zeros", "cut", "minus one"])
def test_a_damaged_checkpoint_fails_the_task_and_its_bytes_stay(name: str, raw: bytes) -> None:
    """E07."""
    bench = dead_after_a(calls(SEND), say())
    bench.store.client.hset(bench.store.keys.checkpoint(T), name, raw)
    before = stored(bench)
    assert bench.run() is Status.FAILED
    assert bench.task().reason.startswith("damaged: ")
    assert stored(bench) == before
    assert len(bench.model.log) == 1
    assert bench.effects == []
    assert text(bench.store.client.hget(bench.store.keys.task(T), "crashes")) == "1", "the one of before"


def test_a_conversation_that_does_not_hold_together_is_damage() -> None:
    """A09: a result without its call."""
    bench = dead_after_a(calls(SEND), say())
    orphan = b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"x","content":"y"}]}'
    bench.store.client.lset(bench.store.keys.messages(T), 0, orphan)
    assert bench.run() is Status.FAILED
    assert len(bench.model.log) == 1
