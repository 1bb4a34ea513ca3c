"""How an attempt lets go when something of ours breaks: bugs, RQ's timeout, Redis, the lease."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tests.support.agents import Bench, T, calls, say, use
from worker.answers import STATE_UNKNOWN
from worker.clock import ManualClock
from worker.errors import RedisUnavailable, StorageRefused
from worker.state.task import Status
from worker.tools import tool

SEND = use("send", 1, line="a")


def started(*steps: Any, **options: Any) -> Bench:
    bench = Bench(*steps, **options)
    bench.enqueue()
    return bench


# -- a bug of ours -------------------------------------------------------------------------------------------------


def test_an_unexpected_error_is_raised_counted_as_a_crash_and_the_task_given_back_at_once() -> None:
    """B03: the way back in is the resume, which repeats no effect."""
    bench = started(calls(SEND), [KeyError("a bug"), say()])
    with pytest.raises(KeyError):
        bench.deliver()
    task = bench.task()
    assert (task.status, task.delivery, task.crashes) == (Status.QUEUED, 2, 1)
    assert not bench.store.client.exists(bench.store.keys.lock(T))
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send a"]


def test_a_bug_that_hits_every_attempt_ends_the_task_and_keeps_it_for_a_person() -> None:
    """H01: dead after three in a row, with what was done and what it died of."""
    bench = started(calls(SEND), [KeyError("a bug")])
    for _ in range(3):
        with pytest.raises(KeyError):
            bench.deliver()
    assert bench.status() is Status.DEAD
    assert "error in the worker: KeyError" in bench.task().reason
    assert len(bench.model.log) == 4
    assert bench.take_over() is None


def test_crashes_with_progress_between_them_do_not_add_up_to_a_dead_task() -> None:
    """The control: in a row is what counts."""
    bench = started(*(calls(use("send", n, line=str(n))) for n in range(6)), say())
    assert bench.run(*(("after-save-b", n) for n in range(1, 7))) is Status.SUCCEEDED
    assert bench.task().crashes == 6


def test_a_cancel_that_was_asked_before_a_bug_struck_is_obeyed() -> None:
    def ask(body: Any, watch: Any) -> Any:
        bench.store.cancel(T, by="ann")
        return KeyError("a bug")

    bench = started(ask)
    with pytest.raises(KeyError):
        bench.deliver()
    assert bench.status() is Status.CANCELLED


# -- Redis away, or full -------------------------------------------------------------------------------------------

FULL = redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'.")
DISK = redis.ResponseError("MISCONF Redis is configured to save RDB snapshots")
AWAY = redis.ConnectionError("Connection refused")
ENDS = {
    "after-model-response": (["send a"], "did send a"),  # point A was not stored: no tool ran, the model is asked again
    "after-effect": (["send a"], STATE_UNKNOWN),
    "after-effect-write": (["send a"], "did send a"),
}


@pytest.mark.parametrize("label", ENDS)
@pytest.mark.parametrize(
    ("trouble", "raised"),
    [(FULL, StorageRefused), (DISK, StorageRefused), (AWAY, RedisUnavailable)],
    ids=["full", "disk", "away"],
)
def test_a_redis_that_does_not_store_stops_the_holder_and_its_lease_is_left_to_lapse(
    label: str, trouble: Exception, raised: type[Exception]
) -> None:
    """F02, F07: nothing more is run; another holder goes on once there is room."""
    bench = started(calls(SEND), say(), store_retry_max_s=5)

    def strike() -> None:
        bench.line.broken = trouble

    with bench.hooked({(label, 1): strike}), pytest.raises(raised, match=str(trouble)[:8]):
        bench.deliver()
    ran = [] if label == "after-model-response" else ["send a"]
    assert bench.effects == ran
    assert bench.status() is Status.RUNNING
    assert 0 < bench.store.client.pttl(bench.store.keys.lock(T)) <= bench.settings.lease_ttl_ms
    assert bench.store.recover(T, proof="its lease ran out") is None, "the lock is still there"
    assert bench.take_over() is Status.QUEUED
    assert bench.run() is Status.SUCCEEDED
    effects, result = ENDS[label]
    assert (bench.effects, bench.results()[0]["content"]) == (effects, result)
    bench.check()


def test_a_ledger_that_takes_no_entry_stops_the_holder_and_is_damage_to_the_next() -> None:
    """The holder lets go of nothing: what it could not record is not to be run again in a hurry."""
    bench = started(calls(SEND), say())
    bench.store.client.set(bench.store.keys.ledger(T), "no hash")
    with pytest.raises(StorageRefused, match="WRONGTYPE"):
        bench.deliver()
    assert (bench.status(), bench.task().crashes) == (Status.RUNNING, 0)
    bench.take_over()
    assert bench.run() is Status.FAILED
    assert bench.task().reason.startswith("damaged: the ledger")
    assert bench.effects == ["send a"]


class MendingClock(ManualClock):
    """The first wait mends what is broken."""

    mend: Callable[[], None] = staticmethod(lambda: None)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.mend()


def test_a_redis_that_is_back_within_the_holders_patience_goes_unnoticed() -> None:
    """The control."""
    clock = MendingClock(int(time.time() * 1000))
    bench = started(calls(SEND), say(), clock=clock)

    def mend() -> None:
        bench.line.broken = None

    def strike() -> None:
        bench.line.broken, clock.mend = AWAY, mend

    with bench.hooked({("after-effect", 1): strike}):
        assert bench.deliver() == "succeeded"
    assert bench.results()[0]["content"] == "did send a"
    assert bench.task().attempts == 1


def test_an_outage_longer_than_the_lease_ends_quietly_as_a_lost_lease() -> None:
    """D10: by then somebody else may hold the task, so there is nothing to report and nothing to write."""
    bench = started(calls(SEND, use("send", 2, line="b")), say())

    def strike() -> None:
        bench.line.broken = AWAY

    with bench.hooked({("after-effect", 1): strike}):
        assert bench.deliver().startswith(f"lease lost: task {T}")
    assert bench.effects == ["send a"]
    assert bench.status() is Status.RUNNING


# -- the lease is lost ---------------------------------------------------------------------------------------------


def losing(lose: Callable[[Bench], Any]) -> Bench:
    """`drop` loses the lease in the middle of its first run; `send` comes after it in the same response."""

    @tool
    def drop(line: str) -> str:
        bench.world.did("drop", line)
        if bench.effects == [f"drop {line}"]:
            lose(bench)
        return "too late"

    bench = started(calls(use("drop", 1, line="a"), use("send", 2, line="b")), say(), tools=(drop,))
    return bench


def taken(bench: Bench) -> None:
    bench.take_over()


def taken_and_finished(bench: Bench) -> None:
    bench.take_over()
    assert bench.run() is Status.SUCCEEDED


def out_of_touch(bench: Bench) -> None:
    bench.clock.advance(bench.settings.lease_ttl_ms / 1000)


@pytest.mark.parametrize("lose", [taken, taken_and_finished, out_of_touch])
def test_a_holder_that_lost_its_lease_in_a_call_writes_and_runs_nothing_more(lose: Callable[[Bench], Any]) -> None:
    """D04, C13, D10: it returns quietly, so that it shows as no failed job."""
    bench = losing(lose)
    assert bench.deliver().startswith(f"lease lost: task {T}, fence 1:")
    if lose is taken_and_finished:
        assert bench.effects == ["drop a", "send b"], "the second is the other holder's"
        assert bench.status() is Status.SUCCEEDED
    else:
        assert bench.effects == ["drop a"]
        bench.take_over()
        assert bench.run() is Status.SUCCEEDED
    assert [block["content"] for block in bench.results()] == [STATE_UNKNOWN, "did send b"]
    assert bench.effects == ["drop a", "send b"]
    assert bench.kinds().count("ended") == 1
    bench.check()


def test_a_lease_that_ran_out_while_the_call_was_being_marked_runs_nothing() -> None:
    """The answer to the marker came too late: by now another holder may have read it."""
    bench = started(calls(SEND), say())
    with bench.hooked({("after-start-mark", 1): lambda: out_of_touch(bench)}):
        assert bench.deliver().startswith("lease lost")
    assert bench.effects == []
    bench.take_over()
    assert bench.run() is Status.SUCCEEDED
    assert (bench.effects, bench.results()[0]["content"]) == ([], STATE_UNKNOWN)


def test_a_holder_that_stays_in_touch_may_take_as_long_as_it_likes() -> None:
    """The control of `out_of_touch`, and B04: the length of a call never matters."""

    def long(bench: Bench) -> None:
        for _ in range(100):
            bench.clock.advance(bench.settings.lease_ttl_ms / 3000)
            bench.renew()

    bench = losing(long)
    assert bench.deliver() == "succeeded"
    assert [block["content"] for block in bench.results()] == ["too late", "did send b"]


def test_a_lease_lost_during_the_model_call_abandons_the_call() -> None:
    def ask(body: Any, watch: Callable[[], None]) -> Any:
        bench.take_over()
        with pytest.raises(BaseException, match="fence"):
            bench.renew()
        watch()
        raise AssertionError("went on without the lease")

    bench = started([ask, say()])
    assert bench.deliver().startswith("lease lost")
    assert bench.run() is Status.SUCCEEDED


def test_a_lease_lost_in_calls_that_run_side_by_side_records_none_of_them() -> None:
    @tool(effect="read_only")
    def peek(n: int) -> int:
        if bench.task().attempts == 1:
            bench.take_over()
        return n

    bench = started(calls(*(use("peek", n, n=n) for n in range(4))), say(), tools=(peek,))
    assert bench.deliver().startswith("lease lost")
    assert not bench.store.client.exists(bench.store.keys.ledger(T))
    assert bench.run() is Status.SUCCEEDED
    assert [block["content"] for block in bench.results()] == ["0", "1", "2", "3"]
