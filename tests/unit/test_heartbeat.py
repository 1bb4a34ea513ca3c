"""The heartbeat: renews on its own, learns of loss and cancel, and ends with its block."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from tests.support.agents import Bench, Line, T
from tests.support.waiting import wait_until
from worker.clock import SystemClock
from worker.dispatch import open_store
from worker.errors import CancelRequested, LeaseLost
from worker.heartbeat import Heartbeat
from worker.settings import load_settings
from worker.state.lease import Holder
from worker.state.ledger import Call
from worker.state.store import Store
from worker.state.task import NewTask

TTL_MS = 1_500


class Beating:
    """A claimed task, and a heartbeat whose line to Redis can be cut."""

    def __init__(self) -> None:
        self.bench = Bench(clock=SystemClock(), lease_ttl_ms=TTL_MS, lease_margin_ms=300)
        self.bench.enqueue()
        claimed = self.bench.store.claim(T, 1, {})
        assert isinstance(claimed, Holder)
        self.holder = claimed
        self.line = Line()
        self.store: Store = self.bench.open(self.line)
        self.renewed = 0
        self.closed = 0
        self._renew, self._close = self.store.renew, self.store.client.close
        self.store.renew = self._counted  # type: ignore[method-assign]
        self.store.client.close = self._closing  # type: ignore[method-assign]

    def _counted(self, holder: Holder) -> None:
        self._renew(holder)
        self.renewed += 1

    def _closing(self) -> None:
        self._close()
        self.closed += 1

    @contextmanager
    def beating(self) -> Iterator[None]:
        with Heartbeat(self.store, self.holder):
            yield

    @property
    def deadline_ms(self) -> float:
        score = self.bench.store.client.zscore(self.bench.store.keys.index("running"), T)
        assert score is not None
        return float(score)


def beats() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("heartbeat-")]


@pytest.fixture
def beating() -> Iterator[Beating]:
    yield Beating()
    wait_until(lambda: not beats(), "the end of the heartbeat's thread")


def test_a_held_task_stays_held_for_longer_than_a_lease(beating: Beating) -> None:
    """D07: renewed from another thread than the one that claimed."""
    first = beating.deadline_ms
    with beating.beating():
        wait_until(lambda: beating.deadline_ms > first + TTL_MS, "a deadline a whole lease later")
        beating.holder.watch()
        assert beating.bench.store.client.get(beating.bench.store.keys.lock(T)) == beating.holder.fence.encode()
        assert beating.bench.store.recover(T, proof="its lease ran out") is None


def test_without_a_heartbeat_the_lease_runs_out(beating: Beating) -> None:
    """The control."""
    lock = beating.bench.store.keys.lock(T)
    wait_until(lambda: not beating.bench.store.client.exists(lock), "the end of the lease")
    with pytest.raises(LeaseLost, match="out of touch"):
        beating.holder.check()


def test_the_loss_of_the_lease_is_noticed_and_ends_the_beats(
    beating: Beating, caplog: pytest.LogCaptureFixture
) -> None:
    with beating.beating():
        beating.bench.store.recover(T, proof="test", fence=beating.holder.fence)
        wait_until(beating.holder.stop.is_set, "the holder to be told")
        wait_until(lambda: not beats(), "the last beat")
        with pytest.raises(LeaseLost, match="the fence is 2: now"):
            beating.holder.check()
    assert beating.closed == 1
    assert "lease-lost" in caplog.text


def test_a_cancel_is_noticed_and_the_beats_go_on(beating: Beating) -> None:
    with beating.beating():
        beating.bench.store.cancel(T, by="ann")
        wait_until(beating.holder.stop.is_set, "the holder to be told")
        with pytest.raises(CancelRequested, match="ann"):
            beating.holder.watch()
        beating.holder.check()
        before = beating.renewed
        wait_until(lambda: beating.renewed > before, "another beat: the task is still to be let go of in order")


def test_a_holder_out_of_touch_is_stopped_by_its_own_clock(beating: Beating) -> None:
    """D10: no answer from Redis is needed for that."""
    beating.line.broken = redis.ConnectionError("cut")
    with beating.beating():
        wait_until(beating.holder.stop.is_set, "the holder to be stopped")
        with pytest.raises(LeaseLost, match="out of touch"):
            beating.holder.check()
    assert beating.renewed == 0


@pytest.mark.parametrize(
    "trouble", [redis.ConnectionError("cut"), redis.TimeoutError("slow"), redis.ResponseError("OOM full")], ids=str
)
def test_a_beat_that_fails_is_tried_again_before_the_lease_is_over(beating: Beating, trouble: Exception) -> None:
    tried = threading.Event()

    failing = beating.store.renew

    def fails_once(holder: Holder) -> None:
        if not tried.is_set():
            beating.line.broken = trouble
            try:
                failing(holder)
            finally:
                tried.set()
                beating.line.broken = None
        failing(holder)

    beating.store.renew = fails_once  # type: ignore[method-assign]
    with beating.beating():
        assert tried.wait(15)
        wait_until(lambda: beating.renewed > 1, "beats after the one that failed")
        beating.holder.check()


def test_the_heartbeat_ends_with_its_block_and_closes_its_own_connection(beating: Beating) -> None:
    with beating.beating():
        assert beats() == [f"heartbeat-{T}"]
        assert beating.closed == 0
    assert beats() == []
    assert beating.closed == 1
    assert beating.bench.store.client.ping(), "the runner's connection is another one"


def test_the_heartbeat_ends_when_its_block_is_left_by_an_error(beating: Beating) -> None:
    with pytest.raises(KeyError), beating.beating():
        raise KeyError
    assert beats() == []


def test_a_beat_that_hangs_does_not_hold_up_the_end(beating: Beating) -> None:
    hanging, over = threading.Event(), threading.Event()

    def hang(holder: Holder) -> None:
        hanging.set()
        over.wait(20)

    beating.store.renew = hang  # type: ignore[method-assign]
    with beating.beating():
        assert hanging.wait(15)
    assert beats() == [f"heartbeat-{T}"], "left before the hanging beat was over"
    over.set()


def test_after_the_task_was_let_go_of_the_heartbeat_says_nothing_of_a_loss(
    beating: Beating, caplog: pytest.LogCaptureFixture
) -> None:
    with beating.beating():
        beating.bench.store.hand_over(beating.holder, "drain")
        wait_until(lambda: not beats(), "the last beat")
    assert "lease-lost" not in caplog.text


def test_beats_and_commits_at_once_do_not_disturb_each_other(beating: Beating) -> None:
    """D13: no lock, no connection and no watched key is shared."""
    bench, holder = beating.bench, beating.holder
    bench.store.begin(holder, {"model": "m"}, {"role": "user", "content": "hi"})

    def beat() -> None:
        for _ in range(300):
            beating.store.renew(holder)

    thread = threading.Thread(target=beat)
    thread.start()
    for n in range(300):
        bench.store.mark_started(holder, Call(1, f"toolu_{n}", "send", {}))
    thread.join(60)
    assert bench.store.client.hlen(bench.store.keys.started(T)) == 300
    assert holder.seq == 301
    assert beating.renewed == 300


@pytest.mark.server
def test_a_process_with_a_thousand_open_files_keeps_its_lease(redis_url: str, redis_client: redis.Redis) -> None:
    """`select` refuses descriptors from 1024 on: the thread died of it, and the task was taken over."""
    store = open_store(load_settings({}, redis_url=redis_url, lease_ttl_ms=TTL_MS, lease_margin_ms=300))
    store.create(NewTask("many", "x", "agents"))
    holder = store.claim("many", 1, {})
    assert isinstance(holder, Holder)
    fillers = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        beat = open_store(load_settings({}, redis_url=redis_url, lease_ttl_ms=TTL_MS, lease_margin_ms=300))
        with Heartbeat(beat, holder):
            first = holder._confirmed
            wait_until(lambda: holder._confirmed > first + TTL_MS / 1000, "renewals for longer than a lease")
    finally:
        for one in fillers:
            os.close(one)
        store.client.close()


@pytest.mark.server
def test_a_heartbeat_that_is_cut_is_back_under_another_number_at_once(
    redis_url: str, redis_client: redis.Redis
) -> None:
    """Long before its next renewal would be due: others take a number that stays away for a death."""
    settings = load_settings({}, redis_url=redis_url)
    store, beat = open_store(settings), open_store(settings)
    store.create(NewTask("cut", "x", "agents"))
    holder = store.claim("cut", 1, {})
    assert isinstance(holder, Holder)

    def number() -> bytes:
        return store.client.hget(store.keys.task("cut"), "beat") or b""

    with Heartbeat(beat, holder):
        wait_until(number, "the first number")
        for _ in range(5):
            before = number()
            client = int(before.rpartition(b":")[2])
            since = time.monotonic()
            store.client.client_kill_filter(_id=client)
            wait_until(lambda before=before: number() != before, "another number")  # type: ignore[misc]
            assert time.monotonic() - since < settings.lease_ttl_ms / 3000, "that was only the next renewal"
    store.client.close()
