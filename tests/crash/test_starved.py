"""A tool keeps Python's interpreter lock for longer than the lease: its process lives, and its heartbeat is silent
(D03, M5). Another worker goes on with the task, and the starved one does nothing more when it comes round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ops.valkey import Server
from tests.support.fleet import Fleet, running_fleet
from tests.support.fleet_own import LEASE, LEASE_S, claimed_at_s, stored
from tests.support.fleet_workers import listening
from tests.support.processes import alive
from tests.support.waiting import wait_until
from worker.answers import STATE_UNKNOWN
from worker.dispatch import open_store
from worker.heartbeat import Heartbeat
from worker.settings import load_settings
from worker.state.codec import digest
from worker.state.keys import call_field
from worker.state.lease import Holder
from worker.state.ledger import Call, Entry
from worker.state.task import NewTask, Status

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(240)]

HOG_S = LEASE_S * 2
CALLS = 1000


@pytest.fixture(scope="module")
def fleet(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("starved"), server.url, **LEASE) as fleet:
        for one in [fleet.worker(FLEET_HOG_S=str(HOG_S)) for _ in range(3)]:
            listening(one)
        fleet.sweeper().expect("sweeping")
        yield fleet


def test_a_starved_process_is_taken_for_dead_and_does_nothing_more_when_it_comes_round(
    fleet: Fleet, verdicts: list[str]
) -> None:
    """Beside it the control: a call as long that lets other threads run keeps its task."""
    starved, patient = fleet.enqueue("starved"), fleet.enqueue("patient")
    first = fleet.await_effect(starved)
    done = fleet.ended(starved)
    assert alive(first.pid), "it must still be in its call, or the test shows nothing"
    assert [event.data["proof"] for event in done.events if event.kind == "recovered"] == ["its lease ran out"]
    before = stored(fleet, starved)
    wait_until(lambda: not alive(first.pid), "the starved horse to go")
    assert stored(fleet, starved) == before
    assert str(fleet.await_job(starved, 1, "finished").return_value()).startswith("lease lost")
    late = fleet.outcome(starved)
    assert late.problems() == []
    assert late.results == [(STATE_UNKNOWN, True), ("appended second", False)]
    assert late.ran == {"append": 2}
    assert [run.what for run in late.runs if run.pid == first.pid] == ["line"]
    assert (late.task.attempts, late.task.crashes, len(late.requests)) == (2, 1, 2)
    first_s, second_s = claimed_at_s(done)
    verdicts.append(f"interpreter lock kept: {second_s - first_s:.1f} s after its claim (lease {LEASE_S:g} s)")

    control = fleet.ended(patient)
    assert control.problems() == []
    assert (control.task.attempts, control.task.crashes) == (1, 0)
    assert control.results == [("appended line", False), ("appended second", False)]
    assert control.ran == {"append": 2}


def test_a_thousand_beats_beside_a_thousand_calls_hold_up_neither(fleet: Fleet) -> None:
    """D13: beat and tool dead-locked, or took each other's answers. Here they share no lock and no connection."""
    hand, heart = (open_store(load_settings({}, redis_url=fleet.url, key_prefix="beats")) for _ in range(2))
    hand.create(NewTask("t1", "say hello", "beats"))
    holder = hand.claim("t1", 1, {})
    assert isinstance(holder, Holder)
    beats: list[int] = []

    def renew(holder: Holder, beat: Callable[[Holder], None] = heart.renew) -> None:
        beat(holder)
        beats.append(1)

    heart.renew = renew  # type: ignore[method-assign]
    heartbeat = Heartbeat(heart, holder)
    heartbeat._period_s = 0.001
    with heartbeat:
        for number in range(CALLS):
            call = Call(1, f"toolu_{number}", "append", {"text": str(number)})
            hand.mark_started(holder, call)
            hand.record_result(holder, call, Entry("append", digest(call.input), f"result {number}", False, 1))
        wait_until(lambda: len(beats) >= CALLS, "a thousand beats")
    assert holder.seq == 2 * CALLS
    ledger = hand.client.hgetall(hand.keys.ledger("t1"))
    results = [Entry.load(ledger[call_field(1, f"toolu_{number}").encode()]).content for number in range(CALLS)]
    assert results == [f"result {number}" for number in range(CALLS)]
    hand.finish(holder, Status.SUCCEEDED, reason="enough")
    hand.client.close()
