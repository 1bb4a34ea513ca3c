"""A tool that may be interrupted: told at a drain, run anew afterwards, and never twice where that would do harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.agents import Bench, Died, T, calls, say, use
from worker import drain
from worker.answers import NOT_EXECUTED, STATE_UNKNOWN
from worker.errors import Interrupted
from worker.state.task import Status
from worker.tools import Tool, ToolContext, tool


@pytest.fixture(autouse=True)
def process() -> Iterator[drain.Drain]:
    drain.begin_anew()
    yield drain.PROCESS
    drain.begin_anew()


def ask_to_drain() -> None:
    drain.PROCESS.ask("SIGTERM", 20)


class Pondering:
    """A tool that takes its effect after it has looked whether to stop; `meanwhile` happens once before that."""

    def __init__(self, meanwhile: Callable[[Bench], object], **marks: object) -> None:
        self.meanwhile: Callable[[Bench], object] | None = meanwhile
        self.began = 0
        self.told: list[bool] = []

        def ponder(line: str, context: ToolContext) -> str:
            self.began += 1
            happens, self.meanwhile = self.meanwhile, None
            if happens:
                happens(self.bench)
            self.told.append(context.cancelled)
            context.stop_if_asked()
            return self.bench.world.did("ponder", line)

        self.tool: Tool = tool(**{"interruptible": True, **marks})(ponder)  # type: ignore[call-overload]
        self.bench = Bench(calls(use("ponder", "a", line="x")), say("done"), tools=(self.tool,))
        self.bench.enqueue()

    def after_the_drain(self) -> list[tuple[object, bool]]:
        drain.begin_anew()
        self.bench.deliver()
        assert self.bench.status() is Status.SUCCEEDED
        self.bench.check()
        return [(block["content"], block.get("is_error", False)) for block in self.bench.results()]


def marker_of(bench: Bench) -> bytes | None:
    found: bytes | None = bench.store.client.hget(bench.store.keys.started(T), "1:toolu_a")
    return found


def test_a_drain_interrupts_it_and_the_next_holder_runs_it_as_if_it_had_never_started() -> None:
    ponder = Pondering(lambda bench: ask_to_drain())
    assert ponder.bench.deliver().startswith("handed over: SIGTERM")
    assert (ponder.told, ponder.bench.effects) == ([True], [])
    assert ponder.bench.status() is Status.QUEUED
    assert marker_of(ponder.bench) is None
    assert ponder.after_the_drain() == [("did ponder x", False)]
    assert (ponder.began, ponder.bench.effects) == (2, ["ponder x"])
    task = ponder.bench.task()
    assert (task.crashes, task.hand_overs, task.attempts) == (0, 1, 2)


def test_any_other_tool_is_not_told_and_ends_in_its_own_time() -> None:
    """The control: its result is kept, and the hand-over comes after it."""
    ponder = Pondering(lambda bench: ask_to_drain(), interruptible=False)
    assert ponder.bench.deliver().startswith("handed over: SIGTERM")
    assert (ponder.told, ponder.bench.effects) == ([False], ["ponder x"])
    assert ponder.after_the_drain() == [("did ponder x", False)]
    assert ponder.began == 1


def test_a_cancel_interrupts_it_too_and_the_history_says_that_it_was_not_executed() -> None:
    def cancel(bench: Bench) -> None:
        bench.store.cancel(T, by="ann")
        bench.renew()

    ponder = Pondering(cancel)
    assert ponder.bench.deliver() == "cancelled"
    assert (ponder.told, ponder.bench.effects) == ([True], [])
    assert [block["content"] for block in ponder.bench.results()] == [NOT_EXECUTED]
    ponder.bench.checkpoint()


def test_a_cancel_nobody_had_heard_of_when_it_was_let_go_of_leaves_a_valid_history_too() -> None:
    """Asked for between two renewals: the hand-over finds it."""

    def drain_and_cancel(bench: Bench) -> None:
        bench.store.cancel(T, by="ann")
        ask_to_drain()

    ponder = Pondering(drain_and_cancel)
    assert ponder.bench.deliver() == "cancelled"
    assert [block["content"] for block in ponder.bench.results()] == [NOT_EXECUTED]
    assert not ponder.bench.checkpoint().pending
    ponder.bench.store.retry(T, by="ann")
    ponder.after_the_drain()


def test_a_lost_lease_interrupts_it_and_nothing_is_written() -> None:
    def lose(bench: Bench) -> None:
        bench.store.recover(T, proof="test", fence=bench.holder.fence)
        bench.holder.lose("taken")

    ponder = Pondering(lose)
    assert ponder.bench.deliver().startswith("lease lost")
    assert marker_of(ponder.bench) is not None, "only its holder may take the mark back"


def test_an_interrupted_rerun_says_nothing_of_the_run_before_it() -> None:
    """Cut off once by a death, then interrupted: only the second run is known to have done nothing."""
    ponder = Pondering(lambda bench: None, effect="idempotent")
    with ponder.bench.dying(("after-start-mark", 1)), pytest.raises(Died):
        ponder.bench.deliver()
    ponder.bench.take_over()
    ponder.meanwhile = lambda bench: ask_to_drain()
    assert ponder.bench.deliver().startswith("handed over")
    assert marker_of(ponder.bench) is not None
    assert ponder.after_the_drain() == [("did ponder x", False)]


def test_a_tool_that_stops_without_being_asked_is_a_failure_and_no_endless_hand_over() -> None:
    @tool(interruptible=True)
    def moody(line: str) -> str:
        raise Interrupted("not today")

    bench = Bench(calls(use("moody", "a", line="x")), say("done"), tools=(moody,))
    bench.enqueue()
    assert bench.run() is Status.SUCCEEDED
    assert [block["is_error"] for block in bench.results()] == [True]
    assert STATE_UNKNOWN not in [block["content"] for block in bench.results()]


def test_a_read_only_tool_is_interrupted_beside_others() -> None:
    ponder = Pondering(lambda bench: ask_to_drain(), effect="read_only")
    bench = ponder.bench
    bench.model.steps[0].append(calls(use("ponder", "a", line="x"), use("look", "b", line="y")))
    bench.model.steps[0].popleft()
    assert bench.deliver().startswith("handed over")
    results = ponder.after_the_drain()
    assert results == [("did ponder x", False), ("did look y", False)]
