"""Deliveries are lost, doubled and late; a task is run by exactly one worker all the same.

Sweeps are the test's own, so that it knows what was there before and after each.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from rq import Queue

from tests.support.fleet import SABOTAGE, Fleet
from tests.support.fleet_workers import START_MAX_S, horses
from tests.support.processes import Proc
from tests.support.waiting import wait_until
from worker.answers import STATE_UNKNOWN
from worker.dispatch import job_id
from worker.state.task import Status
from worker.sweeper import make_sweeper

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash]

WORKERS = 3
COPIES = 5


@pytest.fixture(scope="module")
def agents(fleet: Fleet) -> Fleet:
    """The fleet with its workers on `agents`."""
    fleet.workers(WORKERS)
    return fleet


def deliver_again(fleet: Fleet, task_id: str, delivery: int, copies: int = 1, queue: str = "agents") -> None:
    """The same job once more, as after a restart of the broker or by a second click."""
    fleet.redis.rpush(f"rq:queue:{queue}", *[job_id(task_id, delivery)] * copies)


def times_refused(fleet: Fleet, task_id: str) -> int:
    """How often a worker looked at a delivery of the task and let it be."""
    lines = [line for process in fleet.processes for line in process.output().splitlines()]
    return sum("not-claimed" in line and task_id in line for line in lines)


# -- doubled -----------------------------------------------------------------------------------------------------------


def test_of_one_task_delivered_five_times_at_once_one_worker_runs_it_and_the_others_are_not_failed_jobs(
    agents: Fleet,
) -> None:
    """B10. All copies are looked at while the task is running, its side effect done, nothing recorded."""
    once = agents.ended(agents.enqueue("short"))
    task_id = agents.enqueue("held")
    agents.await_effect(task_id)
    deliver_again(agents, task_id, 1, COPIES - 1)
    wait_until(lambda: times_refused(agents, task_id) >= COPIES - 1, "every copy to be refused")
    assert agents.status(task_id) is Status.RUNNING
    agents.open_gate(task_id)
    done = agents.ended(task_id)
    assert done.problems() == []
    assert done.ran == once.ran == {"append": 1}
    assert len(done.requests) == len(once.requests) == 2
    assert (done.task.attempts, done.task.crashes, done.count("claimed")) == (1, 0, 1)
    assert agents.await_job(task_id, 1, "finished").return_value() in (
        "succeeded",
        "nothing to do: the task is running",
    )
    assert job_id(task_id, 1) not in Queue("agents", connection=agents.redis).failed_job_registry.get_job_ids()


def test_with_claims_that_are_given_to_everybody_the_real_result_of_the_first_holder_is_lost(fleet: Fleet) -> None:
    """The sabotage of the test above: attempts, claims and the result all tell of the second holder."""
    environ = {"BATON_TOOLS": SABOTAGE, "FLEET_SABOTAGE": "claim-anything"}
    fleet.workers(2, "grabbers", **environ)
    task_id = fleet.enqueue("held", "grabbers")
    fleet.await_effect(task_id)
    deliver_again(fleet, task_id, 1, 1, "grabbers")
    done = fleet.ended(task_id)
    fleet.open_gate(task_id)
    assert (done.task.attempts, done.count("claimed")) == (2, 2)
    assert done.results == [(STATE_UNKNOWN, True)]


def test_a_finished_task_that_is_delivered_again_is_left_as_it_is(agents: Fleet) -> None:
    """B11."""
    task_id = agents.enqueue("short")
    before = agents.ended(task_id)
    agents.await_job(task_id, 1, "finished")
    deliver_again(agents, task_id, 1)
    wait_until(lambda: times_refused(agents, task_id), "the second delivery to be looked at")
    job = agents.await_job(task_id, 1, "finished")
    wait_until(lambda: job.return_value(refresh=True) == "nothing to do: the task is succeeded", "RQ to say so")
    after = agents.outcome(task_id)
    assert (after.task, after.runs, after.requests, after.events) == (
        before.task,
        before.runs,
        before.requests,
        before.events,
    )
    assert agents.sweep().redelivered == []


def test_a_failed_task_that_is_delivered_again_before_rq_closed_its_job_stays_failed(fleet: Fleet) -> None:
    """Its worker and horse died just after the end of the task, so that RQ has no failed job: nobody pressed
    "requeue" on it either, and a copy of the delivery is no more than a copy."""
    environ = {"BATON_TOOLS": SABOTAGE, "FLEET_SABOTAGE": "point-after-finish"}
    victim = fleet.victim("after-finish", "unclosed", **environ)
    task_id = fleet.enqueue("once-refused", "unclosed")
    victim.kill_both()
    before = fleet.outcome(task_id)
    assert before.problems(Status.FAILED) == []
    assert fleet.job(task_id).get_status() == "started"
    deliver_again(fleet, task_id, 1, 2, "unclosed")
    fleet.worker("unclosed", preload=False)
    wait_until(lambda: times_refused(fleet, task_id) == 2, "both copies to be looked at", timeout=START_MAX_S)
    fleet.await_job(task_id, 1, "finished")
    after = fleet.outcome(task_id)
    assert (after.task, after.events, after.requests) == (before.task, before.events, before.requests)


def test_two_sweepers_in_a_tight_loop_hand_out_no_task_that_is_being_worked_on(agents: Fleet) -> None:
    """B06: tasks are picked up, run and finished all the time while the sweeps go on."""
    over, sweeps = Event(), []

    def sweep_all_the_time() -> None:
        sweeper = make_sweeper(agents.settings)
        while not over.is_set():
            sweeps.append(sweeper.sweep_once())
        sweeper.store.client.close()

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(sweep_all_the_time) for _ in range(2)]
        try:
            tasks = [agents.enqueue("short") for _ in range(20)]
            outcomes = [agents.ended(task_id) for task_id in tasks]
        finally:
            over.set()
        for one in running:
            one.result()
    assert len(sweeps) > 20
    assert not any(report.recovered or report.redelivered or report.problems for report in sweeps)
    assert [done.problems() for done in outcomes] == [[]] * 20
    assert {(done.task.attempts, done.task.delivery, done.ran["append"]) for done in outcomes} == {(1, 1, 1)}


def test_a_call_that_takes_much_longer_than_the_lease_is_not_taken_over(fleet: Fleet) -> None:
    """B04, B05: only a lapsed lease allows that, and the heartbeat keeps it alive for as long as the tool takes."""
    lease_ms = 2000
    fleet.workers(1, "long", BATON_LEASE_TTL_MS=str(lease_ms), BATON_LEASE_MARGIN_MS="300")
    task_id = fleet.enqueue("held", "long")
    fleet.await_effect(task_id)
    until = time.monotonic() + 3 * lease_ms / 1000
    ttls = []

    def swept_for_three_leases() -> bool:
        assert not fleet.sweep().recovered
        ttls.append(fleet.redis.pttl(fleet.store.keys.lock(task_id)))
        return time.monotonic() > until

    wait_until(swept_for_three_leases, "three leases to pass")
    fleet.open_gate(task_id)
    done = fleet.ended(task_id)
    assert done.problems() == []
    assert done.ran == {"append": 1}
    assert (done.task.attempts, done.task.crashes) == (1, 0)
    assert all(0 < ttl <= lease_ms for ttl in ttls), "the lock lapsed, or had no ttl (D01)"


# -- lost --------------------------------------------------------------------------------------------------------------


def moved_to_intermediate(fleet: Fleet, task_id: str) -> None:
    """C01: a worker with one queue popped it and died."""
    fleet.redis.lmove("rq:queue:agents", "rq:queue:agents:intermediate", "RIGHT", "LEFT")


def popped(fleet: Fleet, task_id: str) -> None:
    """C03: a worker with two queues popped it and died: the id is in no list at all."""
    assert fleet.redis.lrem("rq:queue:agents", 1, job_id(task_id, 1)) == 1


def emptied(fleet: Fleet, task_id: str) -> None:
    """rq-dashboard's "empty queue": the list is deleted, and the jobs' hashes."""
    Queue("agents", connection=fleet.redis).empty()


def deleted(fleet: Fleet, task_id: str) -> None:
    """rq-dashboard's "delete" on the job."""
    fleet.job(task_id).delete()


LOSSES: tuple[Callable[[Fleet, str], None], ...] = (moved_to_intermediate, popped, emptied, deleted)


def test_a_task_whose_delivery_is_lost_is_delivered_again_and_runs_once(agents: Fleet) -> None:
    lost: dict[str, str] = {}
    with agents.busy(WORKERS):
        for lose in LOSSES:
            task_id = agents.enqueue("short")
            assert agents.queued_jobs() == [job_id(task_id, 1)]
            lose(agents, task_id)
            assert agents.queued_jobs() == []
            lost[lose.__name__] = task_id
        lost_at = time.monotonic()
    for how, task_id in lost.items():
        done = agents.ended(task_id, sweeping=True)
        assert done.problems() == [], how
        assert done.ran == {"append": 1}, how
        assert (done.task.attempts, done.task.crashes, done.task.delivery) == (1, 0, 2), how
        assert done.count("redelivered") == 1, how
    assert time.monotonic() - lost_at < 10


def test_a_task_whose_delivery_waits_for_a_worker_is_not_delivered_again(agents: Fleet) -> None:
    """The control, and B07: longer than the grace period, with as many sweeps as go into it."""
    with agents.busy(WORKERS):
        task_id = agents.enqueue("short")
        until = time.monotonic() + agents.settings.redeliver_grace_ms / 1000 + 1
        wait_until(lambda: not agents.sweep() and time.monotonic() > until, "the grace period to pass")
        assert agents.queued_jobs() == [job_id(task_id, 1)]
    done = agents.ended(task_id)
    assert done.problems() == []
    assert (done.task.attempts, done.task.delivery) == (1, 1)


def given_to_a_stopped_worker(fleet: Fleet) -> tuple[Proc, str]:
    """(worker, task): it has popped the task's job and not looked at it. All other workers must be busy."""
    idle = fleet.idle_workers()
    worker = fleet.worker(preload=False)
    wait_until(lambda: fleet.idle_workers() > idle, "the new worker to block for jobs", timeout=START_MAX_S)
    worker.signal(signal.SIGSTOP)
    task_id = fleet.enqueue("short")
    intermediate = fleet.redis.lrange("rq:queue:agents:intermediate", 0, -1)
    assert job_id(task_id, 1).encode() in intermediate  # type: ignore[operator]
    assert fleet.queued_jobs() == []
    assert horses(worker) == []
    return worker, task_id


def test_a_worker_that_is_killed_between_pop_and_start_loses_nothing(agents: Fleet) -> None:
    with agents.busy(WORKERS):
        worker, task_id = given_to_a_stopped_worker(agents)
        worker.kill()
    done = agents.ended(task_id, sweeping=True)
    assert done.problems() == []
    assert done.ran == {"append": 1}
    assert (done.task.attempts, done.task.crashes, done.task.delivery) == (1, 0, 2)


def test_a_worker_that_was_only_stopped_there_runs_what_it_was_given(agents: Fleet) -> None:
    """The control of the kill."""
    with agents.busy(WORKERS):
        worker, task_id = given_to_a_stopped_worker(agents)
        worker.signal(signal.SIGCONT)
        done = agents.ended(task_id)
        assert done.problems() == []
        assert (done.task.attempts, done.task.delivery, done.ran["append"]) == (1, 1, 1)
        worker.terminate()


def test_a_worker_that_is_told_to_go_between_pop_and_start_loses_nothing(agents: Fleet) -> None:
    """C02: whether RQ still runs the job or leaves it lying, the task runs once."""
    with agents.busy(WORKERS):
        worker, task_id = given_to_a_stopped_worker(agents)
        worker.signal(signal.SIGTERM)
        worker.signal(signal.SIGCONT)
        assert worker.wait(30) == 0
    done = agents.ended(task_id, sweeping=True)
    assert done.problems() == []
    assert done.ran == {"append": 1}
    assert (done.task.attempts, done.task.crashes) == (1, 0)


def test_a_late_delivery_finds_the_task_elsewhere_and_does_nothing(agents: Fleet) -> None:
    """Two deliveries of one task on the list: the first was lost, replaced, and came back."""
    with agents.busy(WORKERS):
        task_id = agents.enqueue("short")
        popped(agents, task_id)
        wait_until(lambda: task_id in agents.sweep().redelivered, "the task to be delivered again")
        deliver_again(agents, task_id, 1)
        assert agents.queued_jobs() == [job_id(task_id, 2), job_id(task_id, 1)]
    done = agents.ended(task_id)
    late = agents.await_job(task_id, 1, "finished")
    assert str(late.return_value()).startswith("nothing to do: stale delivery 1, the current one is 2")
    assert done.problems() == []
    assert (done.task.attempts, done.ran["append"]) == (1, 1)
