"""No progress is noticed: a conversation that goes in circles, and an attempt that lives and saves nothing."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from tests.support.agents import Bench, Line, T, calls, say, use
from tests.support.waiting import wait_until
from worker.errors import LeaseLost
from worker.heartbeat import Heartbeat
from worker.state.checkpoint import Message
from worker.state.lease import Holder
from worker.state.task import Status
from worker.stuck import CIRCLES_MAX, Bounds, Watchdog, rounds_alike
from worker.tools import tool

AGAIN = use("look", line="a")
BOUNDS = {"stuck_repeats": 3, "turns_max": 100}


def circling(times: int, **settings: Any) -> Bench:
    """A model that makes the same call over and over, in other words and with another id each time, then ends."""
    steps = [calls({"type": "text", "text": f"Again {n}."}, {**AGAIN, "id": f"toolu_{n}"}) for n in range(times)]
    bench = Bench(*steps, say(), **{**BOUNDS, **settings})
    bench.enqueue(turns_max=100)
    return bench


# -- the same again and again --------------------------------------------------------------------------------------


def test_a_conversation_that_goes_in_circles_is_warned_of_once_and_then_parked_for_a_person() -> None:
    bench = circling(50)
    assert bench.run() is Status.PARKED
    assert bench.checkpoint().turns == 6
    warned = [event for event in bench.views.events(T) if event.kind == "stuck"]
    assert [event.data["turn"] for event in warned] == [3]
    task = bench.task()
    assert (task.wake_at_ms, task.parked.waits_for, task.crashes, task.attempts) == (None, "person", 0, 0)
    assert "no progress: look was called with the same input and the same result 6 times in a row" in task.reason
    assert "`baton retry t1`" in task.reason
    bench.check()


def test_whoever_lets_it_go_on_gives_it_as_many_rounds_again() -> None:
    bench = circling(50)
    bench.run()
    for turns in (12, 18):
        assert bench.store.wake(T)
        assert bench.run() is Status.PARKED
        assert bench.checkpoint().turns == turns


def test_it_ends_well_if_the_model_finds_its_way_out() -> None:
    bench = circling(8)
    bench.run()
    assert bench.store.wake(T)
    assert bench.run() is Status.SUCCEEDED


@pytest.mark.parametrize("how", ["off", "warn"])
def test_it_goes_on_where_it_is_only_warned_of_or_not_even_that(how: str) -> None:
    bench = circling(8, stuck=how)
    assert bench.run() is Status.SUCCEEDED
    assert bench.kinds().count("stuck") == (how == "warn")


def test_a_crash_in_the_middle_of_the_circle_forgets_nothing() -> None:
    bench = circling(50)
    assert bench.run(("after-save-b", 2), ("after-save-b", 5)) is Status.PARKED
    assert bench.checkpoint().turns == 6


def test_control_another_input_or_another_result_is_progress() -> None:
    counted: list[int] = []

    @tool(effect="read_only")
    def poll(job: str) -> str:
        counted.append(1)
        return f"{len(counted)} %"

    steps = [calls(use("poll", n, job="a")) for n in range(8)]
    inputs = [calls(use("look", n, line=str(n // 2))) for n in range(8)]
    for script, tools in ((steps, (poll,)), (inputs, ())):
        bench = Bench(*script, say(), tools=tools, **BOUNDS)
        bench.enqueue()
        assert bench.run() is Status.SUCCEEDED
        assert "stuck" not in bench.kinds()


def test_the_look_back_is_bounded_whatever_the_length_of_the_history() -> None:
    class Tail(list[Message]):
        looked: set[int] = set()  # noqa: RUF012  # of the one there is

        def __getitem__(self, index: Any) -> Any:
            self.looked.add(index % len(self))
            return super().__getitem__(index)

    turn = [
        {"role": "assistant", "content": [AGAIN]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}]},
    ]
    messages = Tail([{"role": "user", "content": "do it"}, *turn * 5_000])
    assert rounds_alike(messages, 60) == 60
    assert min(messages.looked) >= len(messages) - 120
    assert rounds_alike(list(messages)[:1], 60) == 0
    assert rounds_alike(list(messages)[:7], 60) == 3
    assert CIRCLES_MAX * 2 * 10 <= 200


# -- alive, and nothing saved --------------------------------------------------------------------------------------


class Hung:
    """A task in the middle of a side effect that does not come back until `let_go`."""

    def __init__(self) -> None:
        self.inside, self.let_go, self.ended = threading.Event(), threading.Event(), []

        @tool
        def hang(line: str) -> str:
            self.inside.set()
            self.let_go.wait(60)
            return "late"

        self.bench = Bench(calls(use("hang", line="a")), say(), tools=(hang,), lease_ttl_ms=3_600_000)
        self.bench.enqueue()
        self.outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.outcome.append(self.bench.deliver())

    def __enter__(self) -> Hung:
        self._thread.start()
        wait_until(self.inside.is_set, "the tool to run")
        return self

    def __exit__(self, *exc: object) -> None:
        self.let_go.set()
        self._thread.join(30)

    @property
    def holder(self) -> Holder:
        return self.bench.holder

    def look(self, how: str = "park", end: bool = True) -> None:
        dog = Watchdog(self.bench.store, Bounds(how, s=100), (lambda: self.ended.append(1)) if end else None)
        dog.look(self.holder)


def test_a_call_that_hangs_is_warned_of_once_and_then_taken_from_its_process() -> None:
    with Hung() as hung:
        bench = hung.bench
        hung.look()
        bench.clock.advance(101)
        hung.look()
        hung.look()
        assert bench.kinds().count("stuck") == 1
        assert (bench.status(), hung.ended) == (Status.RUNNING, [])
        bench.clock.advance(100)
        hung.look()
        assert hung.ended == [1], "a process that was forked for it ends"
        assert bench.status() is Status.PARKED
        assert "nothing was saved for 201 s" in bench.task().reason
        assert (bench.task().wake_at_ms, bench.task().parked.waits_for) == (None, "person")
    assert hung.outcome[0].startswith("lease lost"), "what comes back late is fenced"
    started = bench.store.client.hkeys(bench.store.keys.started(T))
    assert f"lapsed:{hung.holder.epoch}".encode() in started, "it may have run on, so nobody may trust that it did not"
    assert bench.store.wake(T)
    assert bench.run() is Status.SUCCEEDED
    assert [result["is_error"] for result in bench.results()] == [True], "its outcome is unknown"


def test_a_thread_that_hangs_is_fenced_and_left() -> None:
    with Hung() as hung:
        hung.bench.clock.advance(201)
        hung.look(end=False)
        assert hung.bench.status() is Status.PARKED
        hung.look(end=False)
        with pytest.raises(LeaseLost):
            hung.holder.check()


@pytest.mark.parametrize("how", ["warn", "park"])
def test_one_that_hangs_after_its_lease_was_lost_keeps_no_worker_for_ever(how: str) -> None:
    """Redis was away for longer than the lease: another has the task, and nobody waits for this one."""
    with Hung() as hung:
        dog = Watchdog(hung.bench.store, Bounds(how, s=100), lambda: hung.ended.append(1))
        heartbeat = Heartbeat(hung.bench.open(Line()), hung.holder, lambda: dog.look(hung.holder))
        heartbeat._period_s = 0.01
        hung.holder.lose("out of touch")
        with heartbeat:
            hung.bench.clock.advance(199)
            assert hung.ended == []
            hung.bench.clock.advance(2)
            if how == "park":
                wait_until(lambda: hung.ended, "its process to be ended")
        assert bool(hung.ended) == (how == "park")
        assert hung.bench.status() is Status.RUNNING, "whose it is now is not for this one to say"


@pytest.mark.parametrize("how", ["off", "warn"])
def test_it_stays_where_it_is_only_warned_of_or_not_even_that(how: str, caplog: pytest.LogCaptureFixture) -> None:
    with Hung() as hung:
        hung.bench.clock.advance(1_000)
        with caplog.at_level(logging.WARNING):
            hung.look(how)
            hung.look(how)
        assert hung.bench.status() is Status.RUNNING
        assert hung.ended == []
        assert sum("stuck" in record.getMessage() for record in caplog.records) == (how == "warn")


def test_control_every_commit_is_progress() -> None:
    bench = Bench(say())
    bench.enqueue()
    holder = bench.store.claim(T, 1, {})
    assert isinstance(holder, Holder)
    dog = Watchdog(bench.store, Bounds("park", s=100))
    bench.clock.advance(10)
    holder.confirm(bench.clock.monotonic())
    began = holder.progressed_at
    bench.store.begin(holder, {}, {"role": "user", "content": "x"})
    assert holder.progressed_at == began + 10
    bench.clock.advance(99)
    holder.confirm(bench.clock.monotonic())
    dog.look(holder)
    assert bench.kinds().count("stuck") == 0
    bench.clock.advance(2)
    holder.confirm(bench.clock.monotonic())
    dog.look(holder)
    assert bench.kinds().count("stuck") == 1


def test_a_cancel_that_a_hung_call_never_hears_of_ends_its_process_and_not_the_keeper_of_leases() -> None:
    with Hung() as hung:
        hung.bench.store.cancel(T, "a person")
        hung.bench.clock.advance(201)
        hung.look()
        assert hung.ended == [1]
        assert hung.bench.take_over() is Status.CANCELLED
