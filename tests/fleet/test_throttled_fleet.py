"""One 429 to one of many tasks: nobody asks before its time, then a few, then more; and no worker waits for it. Nor
does one wait for ever for a call that hangs.

The times are those at which the model was really asked. Being late is no fault on a busy machine, being early is: so
what is bounded is how many had asked by each moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from ops.valkey import Server
from tests.support.fleet import Fleet, running_fleet
from tests.support.fleet_workers import listening
from tests.support.processes import alive
from tests.support.waiting import wait_until
from worker.state.task import Status

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.timeout(120)]

TASKS = 20
WAIT_S, STEP_S = 2.0, 1.0  # as the script says; the default
IMPATIENT = {"BATON_STUCK_S": "2", "BATON_LEASE_TTL_MS": "3000", "BATON_LEASE_MARGIN_MS": "500"}
WORKERS = (*["worker.fleet.ForkWorker"] * 2, "worker.fleet.ThreadWorker")


@pytest.fixture(scope="module")
def fleet(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Workers of two classes that share a queue, a key and a sweeper, which sweeps no more often than by default."""
    with running_fleet(tmp_path_factory.mktemp("throttled"), server.url) as made:
        started = [made.worker(options=("-w", name), preload=False, BATON_CONCURRENCY="20") for name in WORKERS]
        forking = ("-w", "worker.fleet.ForkWorker")
        started.append(made.worker("hung", options=forking, preload=False, **IMPATIENT))
        for one in started:
            listening(one)
        made.sweeper(BATON_SWEEP_PERIOD_S="1")
        yield made


def asked_at_s(fleet: Fleet, task_id: str) -> list[float]:
    return [line["at"] for line in fleet.requests(fleet.task(task_id).text)]


def refused(fleet: Fleet) -> str:
    """A task that was told to wait; what others were told before is forgotten."""
    keys = fleet.store.keys
    fleet.redis.delete(keys.apis(), *fleet.redis.scan_iter(keys.api("*")))
    task_id = fleet.enqueue("told")
    fleet.await_status(task_id, Status.PARKED)
    return task_id


def test_one_refusal_is_waited_out_by_all_who_then_come_back_one_two_four(fleet: Fleet) -> None:
    told = refused(fleet)
    others = [fleet.enqueue("asks") for _ in range(TASKS - 1)]

    def all_aside() -> bool:  # as many as the machine is quick enough for
        counts = fleet.views.counts()
        return counts["parked"] > TASKS / 2 and counts["running"] == counts["queued"] == 0

    wait_until(all_aside, "tasks to wait without a worker")
    for task_id in (told, *others):
        outcome = fleet.ended(task_id)
        assert outcome.problems() == []
        assert (outcome.task.attempts, outcome.task.crashes) == (1, 0)

    (refused_at, again_at), rest = asked_at_s(fleet, told), [asked_at_s(fleet, one) for one in others]
    assert {len(times) for times in rest} == {1}, "there was one refusal, and it reached one"
    asked = sorted([again_at, *(times[0] for times in rest)])
    for stage in range(5):
        by_then = refused_at + WAIT_S + stage * STEP_S
        assert sum(at < by_then for at in asked) <= 2**stage - 1
    assert 2 * STEP_S <= asked[-1] - asked[0] < 15, "spread out, and not for ever"


def test_the_status_tells_who_waits_for_what(fleet: Fleet) -> None:
    told = refused(fleet)
    shown = fleet.start("status", "baton", "status")
    shown.wait()
    assert re.search(r"127\.0\.0\.1 \S+: .*, \d tasks in line, told by 429", shown.output()), shown.output()
    fleet.ended(told)


def test_a_call_that_hangs_is_warned_of_and_parked_and_its_work_horse_ends(fleet: Fleet) -> None:
    task_id = fleet.enqueue("held", "hung")
    horse = fleet.await_effect(task_id).pid
    fleet.await_status(task_id, Status.PARKED)
    wait_until(lambda: not alive(horse), "the horse to end")
    outcome = fleet.outcome(task_id)
    assert outcome.count("stuck") == 1
    assert "no progress: nothing was saved for" in outcome.task.reason
    assert (outcome.task.wake_at_ms, outcome.task.crashes, outcome.ran) == (None, 0, {"append": 1})
    assert fleet.sweep().recovered == {}
    fleet.store.cancel(task_id, "the test")
