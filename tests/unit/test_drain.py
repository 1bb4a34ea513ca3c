"""What a drain asks of whom, and when."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.support.agents import Bench, T, calls, say, use
from tests.support.waiting import wait_until
from worker import drain, horse
from worker.drain import MARGIN, Drain
from worker.errors import DrainRequested
from worker.heartbeat import Heartbeat
from worker.settings import load_settings
from worker.state.lease import Holder
from worker.state.task import Status


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """The process's own drain and signal handlers, as they were."""
    kept = {number: signal.getsignal(number) for number in horse.SIGNALS}
    drain.begin_anew()
    yield
    drain.begin_anew()
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_nothing_is_let_go_of_before_somebody_asks() -> None:
    idle = Drain()
    idle.leave()
    idle.leave(abandoning=True)
    assert idle.left_s() == idle.patience_s() == idle.ends_in_s() == float("inf")


def test_a_drain_leaves_time_for_each_step_of_the_farewell() -> None:
    """In order: model calls are abandoned, then work-horses ended, then the process."""
    asked = Drain()
    asked.ask("SIGTERM", 10)
    asked.ask("again", 1_000)
    assert asked.why == "SIGTERM"
    with pytest.raises(DrainRequested):
        asked.leave()
    asked.leave(abandoning=True)
    assert 10 * (1 - MARGIN) - 1 < asked.left_s() < asked.patience_s() < asked.ends_in_s() < 10


def test_an_overdue_drain_abandons_a_model_call() -> None:
    asked = Drain()
    asked.ask("SIGTERM", 0)
    with pytest.raises(DrainRequested) as raised:
        asked.leave(abandoning=True)
    assert raised.value.abandoned


def test_a_task_is_handed_over_between_two_calls_and_goes_on_there() -> None:
    bench = Bench(calls(use("send", "a", line="x"), use("send", "b", line="y")), say("done"))
    bench.enqueue()
    with bench.hooked({("after-effect-write", 1): lambda: drain.PROCESS.ask("SIGTERM", 20)}):
        assert bench.deliver() == "handed over: SIGTERM"
    assert bench.effects == ["send x"]
    drain.begin_anew()
    assert bench.run() is Status.SUCCEEDED
    assert bench.effects == ["send x", "send y"]
    bench.check()
    assert (bench.task().crashes, bench.task().hand_overs) == (0, 1)


# -- in a work-horse ---------------------------------------------------------------------------------------------------


@pytest.fixture
def beating() -> tuple[Bench, Holder]:
    bench = Bench(lease_ttl_ms=60_000)
    bench.enqueue()
    claimed = bench.store.claim(T, 1, {})
    assert isinstance(claimed, Holder)
    return bench, claimed


def test_sigterm_asks_for_a_drain_and_ends_nothing(beating: tuple[Bench, Holder]) -> None:
    horse.listen(load_settings({}))
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert drain.PROCESS.asked
    assert 19 < drain.PROCESS.ends_in_s() < 20


def test_a_ring_makes_the_heartbeat_look_at_once(beating: tuple[Bench, Holder]) -> None:
    """The next renewal is 20 s away, and there is a cancel."""
    bench, holder = beating
    horse.listen(bench.settings)
    with horse.kept(bench.open(bench.line), holder, bench.settings, None):
        bench.store.cancel(T, by="ann")
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: holder.cancel, "the cancel to be known")


def test_a_horse_notices_beside_a_renewal_that_its_worker_is_to_end(beating: tuple[Bench, Holder]) -> None:
    bench, holder = beating
    asked = threading.Event()
    with horse.kept(bench.open(bench.line), holder, bench.settings, asked.is_set) as heartbeat:
        assert isinstance(heartbeat, Heartbeat)
        heartbeat.ring()
        assert not drain.PROCESS.asked
        asked.set()
        heartbeat.ring()
        wait_until(lambda: drain.PROCESS.asked, "the drain")


def test_a_process_that_is_no_work_horse_keeps_its_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RQ_WORKER_ID", raising=False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert not horse.listen_in_stock_horse(load_settings)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.setenv("RQ_WORKER_ID", "w")
    assert horse.listen_in_stock_horse(lambda: load_settings({}))
    os.kill(os.getpid(), signal.SIGTERM)
    assert drain.PROCESS.asked
