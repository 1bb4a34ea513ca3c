"""A plain `rq worker QUEUE -u URL` is all a fleet needs; what is wrong with a worker or a job hurts no task."""

from __future__ import annotations

import pytest
from rq import Queue
from rq.job import Job

from tests.support.fleet import TOOLS, Fleet
from tests.support.fleet_workers import listening
from tests.support.keys import leftover_keys
from tests.support.waiting import wait_until
from worker.dispatch import job_id
from worker.state.keys import INDEXES
from worker.state.task import Status

pytestmark = [pytest.mark.server, pytest.mark.fleet]

WORKERS = 2
MARK = "sesame-4711"
LATE = "late_tools"


@pytest.fixture(scope="module")
def agents(fleet: Fleet) -> Fleet:
    """The fleet with its workers on `agents`."""
    fleet.workers(WORKERS)
    return fleet


def test_a_plain_rq_worker_runs_a_task_from_beginning_to_end(fleet: Fleet) -> None:
    """Nothing preloaded, no flag but the URL."""
    worker = listening(fleet.worker("plain", preload=False))
    assert worker.argv[1:] == ["worker", "plain", "-u", fleet.url]
    done = fleet.ended(fleet.enqueue("all", "plain"))
    assert done.problems() == []
    assert done.ran == {"read": 1, "put": 1, "append": 1, "pay": 1}
    assert done.task.result == "done"
    assert (done.task.attempts, done.progress["turns"], done.progress["totalTokens"]) == (1, 2, 30)
    assert fleet.await_job(done.task.task_id, 1, "finished").return_value() == "succeeded"
    worker.expect("Job OK")
    assert worker.terminate() == 0


def test_as_many_tasks_run_at_once_as_there_are_workers(agents: Fleet) -> None:
    with agents.busy(WORKERS) as held:
        waiting = agents.enqueue("short")
        assert {agents.status(task_id) for task_id in held} == {Status.RUNNING}
        assert len({agents.task(task_id).owner["pid"] for task_id in held}) == WORKERS
        assert agents.status(waiting) is Status.QUEUED
    for task_id in [*held, waiting]:
        done = agents.ended(task_id)
        assert done.problems() == []
        assert (done.task.attempts, done.ran["append"]) == (1, 1)


def test_a_task_that_fails_shows_as_a_failed_job_with_a_clean_sentence(agents: Fleet) -> None:
    done = agents.ended(agents.enqueue("refused"))
    assert done.problems(Status.FAILED) == []
    job = agents.await_job(done.task.task_id, 1, "failed")
    assert job.id in Queue("agents", connection=agents.redis).failed_job_registry.get_job_ids()
    shown = job.latest_result().exc_string.strip().splitlines()[-1]
    assert shown == f"worker.errors.TaskFailed: task {done.task.task_id} failed: {done.task.reason}"
    assert "not to the API's taste" in shown
    assert len(done.requests) == 1
    control = agents.ended(agents.enqueue("short"))
    assert agents.await_job(control.task.task_id, 1, "finished").return_value() == "succeeded"


@pytest.mark.parametrize("kind", ["all", "refused"])
def test_no_log_and_no_job_holds_the_text_of_a_task(agents: Fleet, kind: str) -> None:
    """I07: RQ prints descriptions into logs, its dashboard shows all it has."""
    done = agents.ended(agents.enqueue(kind, more=f"the word is {MARK}", system=f"never say {MARK}"))
    agents.await_job(done.task.task_id, 1, "finished", "failed")
    stored, logs = agents.stored_by_rq(), agents.logs()
    assert MARK in done.task.text
    assert MARK in str(done.requests[0]["body"]["messages"]), "else its absence elsewhere would prove nothing"
    assert done.task.task_id.encode() in stored
    assert done.task.task_id in logs
    assert MARK.encode() not in stored
    assert MARK not in logs


def test_nothing_of_an_ended_task_stays_for_ever(agents: Fleet) -> None:
    """F03: its own keys go after the retention time, RQ's jobs much sooner, failed ones included."""
    settings = agents.settings
    tasks = [agents.enqueue(kind) for kind in ("all", "short", "refused")]
    for task_id in tasks:
        agents.ended(task_id)
        agents.await_job(task_id, 1, "finished", "failed")
    keys = {key: ttl for key, ttl in leftover_keys(agents.redis).items() if any(task_id in key for task_id in tasks)}
    jobs = {key: ttl for key, ttl in keys.items() if key.startswith("rq:")}
    ours = {key: ttl for key, ttl in keys.items() if key.startswith("baton:")}
    assert {f"rq:job:{job_id(task_id, 1)}" for task_id in tasks} <= jobs.keys()
    assert keys.keys() == jobs.keys() | ours.keys()
    assert all(0 < ttl <= settings.retention_s * 1000 for ttl in ours.values()), ours
    assert all(0 < ttl <= settings.job_failure_ttl_s * 1000 for ttl in jobs.values()), jobs
    assert 0 < jobs[f"rq:job:{job_id(tasks[0], 1)}"] <= settings.job_result_ttl_s * 1000
    fleet_wide = {key for key in leftover_keys(agents.redis) if key.startswith("baton:") and ":task:" not in key}
    assert fleet_wide <= {f"baton:{name}" for name in (*INDEXES, "missing", "counters", "feed")}


def test_a_worker_without_the_tool_module_parks_the_task_and_a_later_worker_finishes_it(fleet: Fleet) -> None:
    """A deploy in the wrong order: no attempt is lost, no effect is, and a person reads what is missing."""
    worker = fleet.worker("late", preload=False, BATON_TOOLS=LATE)
    task_id = fleet.enqueue("short", "late")
    fleet.await_status(task_id, Status.PARKED)
    parked = fleet.task(task_id)
    assert parked.reason.startswith(f"needs a person: tools module {LATE} cannot be imported")
    assert "No module named" in parked.reason
    assert parked.crashes == 0
    assert fleet.await_job(task_id, 1, "finished").return_value() == f"parked: {parked.reason}"
    (fleet.cwd / f"{LATE}.py").write_text(f"from {TOOLS} import *\nfrom {TOOLS} import append\n")
    assert fleet.store.wake(task_id)
    done = fleet.ended(task_id)
    assert done.problems() == []
    assert done.ran == {"append": 1}
    worker.terminate()


def test_a_worker_with_a_wrong_serializer_loses_and_kills_no_task(agents: Fleet) -> None:
    """J06: it fails the jobs it is given. A right worker and a sweep complete the task."""
    with agents.busy(WORKERS):
        wrong = agents.worker(options=("-S", "json"), preload=False)
        task_id = agents.enqueue("short")
        job = agents.await_job(task_id, 1, "failed")
        assert "DeserializationError" in job.latest_result().exc_string
        assert agents.status(task_id) is Status.QUEUED
        wrong.terminate()
    done = agents.ended(task_id, sweeping=True)
    assert done.problems() == []
    assert done.ran == {"append": 1}
    assert (done.task.attempts, done.task.crashes, done.task.delivery) == (1, 0, 2)


def test_a_foreign_job_on_the_queue_is_run_by_a_stock_worker_and_hurts_no_task(agents: Fleet) -> None:
    """J04, as it is: RQ runs whatever it is given, so who may write to Redis may run code on a stock worker. Baton's
    own worker classes refuse such jobs; a plain `rq worker` cannot."""
    queue = Queue("agents", connection=agents.redis)
    good, bad = queue.enqueue("operator.add", 1, 2), queue.enqueue("operator.truediv", 1, 0)
    garbage = queue.enqueue("operator.add", 1, 2, at_front=False)
    agents.redis.hset(Job.key_for(garbage.id), "data", b"no pickle at all")
    done = agents.ended(agents.enqueue("short"))
    assert done.problems() == []
    assert (done.task.attempts, done.ran["append"]) == (1, 1)
    wait_until(lambda: good.get_status() == "finished" and bad.get_status() == "failed", "the foreign jobs' ends")
    assert not agents.sweep().problems
