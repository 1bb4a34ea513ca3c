"""`worker.fleet.ThreadWorker`: many tasks in one process, and what becomes of all of them when it is killed, told to
end, stopped, or left without Redis."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import rq_dashboard
from flask import Flask
from rq import Worker
from rq.command import send_shutdown_command, send_stop_job_command

from tests.support.fleet import Fleet, measured
from tests.support.fleet_outcome import Outcome
from tests.support.fleet_own import LEASE_S, OwnServer, own_fleet, passing
from tests.support.fleet_workers import listening
from tests.support.processes import Proc
from tests.support.waiting import wait_until
from worker.dispatch import job_id
from worker.state.task import Status

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(240)]

GRACE_S = 3.0
THREADS = ("-w", "worker.fleet.ThreadWorker", "--job-monitoring-interval", "1")


@pytest.fixture(scope="module")
def own(server_binary: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, OwnServer]]:
    """A fleet with a lease of 2.5 s; its workers are started by `working`, and shared by the tests that leave them
    alive."""
    limits = {"BATON_DRAIN_GRACE_S": str(GRACE_S), "BATON_CRASHES_IN_ROW_MAX": "9"}
    with own_fleet(tmp_path_factory.mktemp("threads"), **limits, **measured()) as (fleet, server):
        yield fleet, server


def working(fleet: Fleet, number: int) -> list[Proc]:
    """So many thread workers that listen, and no more."""
    there = [one for one in fleet.processes if one.returncode is None]
    for one in there[number:]:
        one.close()
    there = there[:number]
    there += [fleet.worker(options=THREADS, preload=False) for _ in range(number - len(there))]
    return [listening(one) for one in there]


def on(fleet: Fleet, worker: Proc, tasks: list[str]) -> list[str]:
    """Which of the tasks the worker holds now."""
    found = [fleet.task(one) for one in tasks]
    return [one.task_id for one in found if one.status is Status.RUNNING and one.owner["pid"] == worker.pid]


def all_ended(fleet: Fleet, tasks: list[str]) -> list[Outcome]:
    """Their outcomes, none of which may show a problem; this test is the sweeper."""

    def over() -> bool:
        fleet.sweep()
        return all(fleet.status(one).ended for one in tasks)

    wait_until(over, "the end of all tasks", poll_s=0.2)
    done = [fleet.outcome(one) for one in tasks]
    assert [problem for one in done for problem in one.problems()] == []
    return done


def unknown(done: Outcome) -> int:
    """How many calls the model was told of that nobody knows the outcome of."""
    return sum(is_error and "state of this call is unknown" in str(content) for content, is_error in done.results)


def rq_worker(fleet: Fleet, process: Proc) -> Any:
    return next(one for one in Worker.all(connection=fleet.redis) if one.pid == process.pid)


def open_in_rq(fleet: Fleet, tasks: list[str]) -> list[str]:
    """First deliveries that RQ still takes for running, or for just popped."""
    members: Any = fleet.redis.zrange(f"rq:wip:{fleet.queue}", 0, -1)
    popped: Any = fleet.redis.lrange(f"rq:queue:{fleet.queue}:intermediate", 0, -1)
    ours = {job_id(one, 1) for one in tasks}
    return [name for name in (raw.decode().partition(":")[0] for raw in [*members, *popped]) if name in ours]


def gone(worker: Proc, since: float) -> None:
    """It ended by itself, in time, and well."""
    assert worker.wait() == 0, worker.output()
    assert time.monotonic() - since < GRACE_S, worker.output()


def test_forty_tasks_at_once_in_one_process_take_effect_once_each_and_rq_shows_them_all(
    own: tuple[Fleet, OwnServer],
) -> None:
    fleet, _ = own
    (worker,) = working(fleet, 1)
    before = rq_worker(fleet, worker).successful_job_count
    tasks = [fleet.enqueue("held" if number % 2 else "all") for number in range(40)]
    held = tasks[1::2]
    wait_until(lambda: len(on(fleet, worker, held)) == len(held), "the held ones to be held at once")
    wait_until(lambda: rq_worker(fleet, worker).current_execution_count == len(held), "RQ to be told")
    seen = rq_worker(fleet, worker)
    assert {one.job_id for one in seen.get_current_executions()} == {job_id(one, 1) for one in held}
    assert seen.get_state() == "busy"
    assert _dashboard(fleet)[seen.name]["current_job"]["job_id"] in {job_id(one, 1) for one in held}
    assert {fleet.job(one).get_status() for one in held} == {"started"}
    for one in held:
        fleet.open_gate(one)
    done = all_ended(fleet, tasks)
    assert all(one.ran["append"] == 1 and one.task.attempts == 1 and unknown(one) == 0 for one in done)
    assert {run.pid for one in done for run in one.runs} == {worker.pid}
    wait_until(lambda: rq_worker(fleet, worker).get_state() == "idle", "RQ to be told of the end")
    assert rq_worker(fleet, worker).successful_job_count == before + len(tasks)
    job = fleet.await_job(tasks[0], 1, "finished")
    assert job.return_value() == "succeeded"
    assert 0 < fleet.redis.ttl(job.key) <= fleet.settings.job_result_ttl_s
    assert open_in_rq(fleet, tasks) == []


def test_a_task_that_fails_is_a_failed_job_and_a_job_of_somebody_else_is_not_run(own: tuple[Fleet, OwnServer]) -> None:
    fleet, _ = own
    (worker,) = working(fleet, 1)
    done = fleet.ended(fleet.enqueue("refused"))
    assert done.task.status is Status.FAILED
    assert "failed" in str(fleet.await_job(done.task.task_id, 1, "failed").latest_result().exc_string)
    foreign = fleet.store.writes.dispatcher._queue(fleet.queue).enqueue("os.mkdir", str(fleet.home / "foreign"))
    wait_until(lambda: foreign.get_status() == "failed", "the foreign job to be refused")
    assert not (fleet.home / "foreign").exists()
    worker.assert_running()


def test_after_a_kill_with_many_in_flight_all_are_recovered_and_nothing_takes_effect_twice(
    own: tuple[Fleet, OwnServer],
) -> None:
    fleet, _ = own
    workers = working(fleet, 2)
    tasks = [fleet.enqueue("held" if number % 2 else "rounds") for number in range(60)]
    held = tasks[1::2]
    for one in held:
        fleet.await_effect(one)
    victim = max(workers, key=lambda one: len(on(fleet, one, held)))
    caught = on(fleet, victim, held)
    assert len(caught) > 5
    victim.kill()
    for one in held:
        fleet.open_gate(one)
    done = {one.task.task_id: one for one in all_ended(fleet, tasks)}
    assert all(done[one].task.crashes == 1 and unknown(done[one]) == 1 for one in caught)
    untouched = set(held) - set(caught)
    assert all(done[one].task.crashes == 0 and unknown(done[one]) == 0 for one in untouched)


def test_told_to_end_under_load_it_hands_everything_over_and_nothing_becomes_unknown(
    own: tuple[Fleet, OwnServer],
) -> None:
    fleet, _ = own
    workers = working(fleet, 2)
    tasks = [fleet.enqueue("rounds") for _ in range(40)]
    wait_until(lambda: all(len(on(fleet, one, tasks)) > 3 for one in workers), "both to be at work")
    since = time.monotonic()
    workers[0].signal(signal.SIGTERM)
    gone(workers[0], since)
    done = all_ended(fleet, tasks)
    assert all(one.task.crashes == 0 and unknown(one) == 0 for one in done)
    assert sum(one.count("handed-over") for one in done) > 3
    assert workers[0].pid not in {one.pid for one in Worker.all(connection=fleet.redis)}


def test_a_tool_that_outlives_the_grace_is_left_to_reconcile_and_counts_as_no_crash(
    own: tuple[Fleet, OwnServer],
) -> None:
    """Told by RQ's shutdown command, then by a signal, which changes nothing; the other task of it loses nothing."""
    fleet, _ = own
    (worker,) = working(fleet, 1)
    stuck, waiting = fleet.enqueue("held"), fleet.enqueue("slow")
    fleet.await_effect(stuck)
    fleet.await_effect(waiting)
    since = time.monotonic()
    send_shutdown_command(fleet.redis, rq_worker(fleet, worker).name)
    worker.expect("drains")
    worker.signal(signal.SIGTERM)
    gone(worker, since)
    assert fleet.task(stuck).status is Status.QUEUED, worker.output()
    assert open_in_rq(fleet, [stuck, waiting]) == []
    working(fleet, 1)
    stuck_done, waiting_done = all_ended(fleet, [stuck, waiting])
    assert (stuck_done.task.crashes, unknown(stuck_done), stuck_done.ran["append"]) == (0, 1, 1)
    assert (waiting_done.task.crashes, unknown(waiting_done)) == (0, 0)


def test_a_stopped_job_is_a_cancelled_task_with_a_valid_history_and_the_others_go_on(
    own: tuple[Fleet, OwnServer],
) -> None:
    fleet, _ = own
    (worker,) = working(fleet, 1)
    stopped, other = fleet.enqueue("hangs"), fleet.enqueue("held")
    fleet.await_effect(stopped)
    fleet.await_effect(other)
    wait_until(lambda: fleet.job(stopped).get_status() == "started", "RQ to be told")
    send_stop_job_command(fleet.redis, job_id(stopped, 1))  # the model would hang for ever
    done = fleet.ended(stopped)
    assert done.problems(Status.CANCELLED) == []
    assert [entry["role"] for entry in done.messages] == ["user", "assistant", "user"]
    fleet.await_job(stopped, 1, "stopped")
    assert fleet.status(other) is Status.RUNNING
    fleet.open_gate(other)
    assert unknown(all_ended(fleet, [other])[0]) == 0
    worker.assert_running()


def test_redis_away_for_a_moment_costs_no_task_and_the_worker_comes_back(own: tuple[Fleet, OwnServer]) -> None:
    """Busy, and then idle for longer than a lease."""
    fleet, server = own
    (worker,) = working(fleet, 1)
    held = [fleet.enqueue("held") for _ in range(5)]
    for one in held:
        fleet.await_effect(one)
    server.kill()
    worker.expect("renewal-failed")
    passing(0.3)
    server.start()
    for one in held:
        fleet.open_gate(one)
    done = all_ended(fleet, held)
    assert all((one.task.attempts, one.task.crashes, unknown(one)) == (1, 0, 0) for one in done)
    server.kill()
    passing(LEASE_S)
    server.start()
    all_ended(fleet, [fleet.enqueue("short")])
    worker.assert_running()


def _dashboard(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """What rq-dashboard's page of workers is made of, by name."""
    app = Flask(__name__)
    app.config.from_object(rq_dashboard.default_settings)
    app.config["RQ_DASHBOARD_REDIS_URL"] = fleet.url
    rq_dashboard.web.setup_rq_connection(app)
    app.register_blueprint(rq_dashboard.blueprint)
    answer = app.test_client().get("/0/data/workers.json").get_json()
    return {one["name"]: one for one in answer["workers"]}
