"""rq-dashboard, as it comes, beside our tasks: it shows no task text, and its buttons lose and double nothing."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest

from ops.processes import free_port
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until
from worker.dispatch import job_id
from worker.state.task import Status

pytestmark = [pytest.mark.server, pytest.mark.fleet]

PAYLOAD = "<img src=x onerror=alert(4711)>"


@dataclass
class Dashboard:
    """What a browser would get from it."""

    url: str

    def get(self, path: str) -> tuple[int, str]:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.status, answer.read().decode()

    def json(self, path: str) -> Any:
        return json.loads(self.get(path)[1])

    def press(self, path: str) -> dict[str, Any]:
        """A button: an empty POST."""
        with urllib.request.urlopen(self.url + path, data=b"", timeout=10) as answer:
            return dict(json.load(answer))

    def job(self, task_id: str, delivery: int = 1) -> dict[str, Any]:
        return dict(self.json(f"/0/data/job/{job_id(task_id, delivery)}.json"))


@pytest.fixture(scope="module")
def agents(fleet: Fleet) -> Fleet:
    """The fleet with a worker on `agents`."""
    fleet.workers(1)
    return fleet


@pytest.fixture(scope="module")
def dashboard(agents: Fleet) -> Dashboard:
    port = free_port()
    process = agents.start("dashboard", "rq-dashboard", "-b", "127.0.0.1", "-p", str(port), "-u", agents.url)
    shown = Dashboard(f"http://127.0.0.1:{port}")

    def answers() -> bool:
        process.assert_running()
        try:
            return shown.get("/")[0] == 200
        except OSError:
            return False

    wait_until(answers, "the dashboard to answer", timeout=30)
    return shown


def failed(fleet: Fleet, kind: str = "once-refused") -> str:
    """A task that has failed, and whose job RQ lists as failed. Asked again, the model would answer."""
    done = fleet.ended(fleet.enqueue(kind))
    assert done.task.status is Status.FAILED
    fleet.await_job(done.task.task_id, 1, "failed")
    return done.task.task_id


def test_it_starts_with_what_we_install_and_shows_our_queue(agents: Fleet, dashboard: Dashboard) -> None:
    """J03: rq-dashboard 0.9 imports six and does not say so."""
    assert dashboard.get("/")[0] == 200
    with agents.busy(1):
        waiting = agents.enqueue("short")
        (queue,) = [queue for queue in dashboard.json("/0/data/queues.json")["queues"] if queue["name"] == "agents"]
        assert (queue["count"], queue["started_job_registry_count"]) == (1, 1)
        assert "workers" in dashboard.json("/0/data/workers.json"), "the workers page, while one is busy"
    assert agents.ended(waiting).problems() == []


@pytest.mark.parametrize(("kind", "status"), [("all", "finished"), ("refused", "failed")])
def test_what_it_shows_of_a_job_holds_no_task_text(agents: Fleet, dashboard: Dashboard, kind: str, status: str) -> None:
    """J01: it puts descriptions, results and errors into its pages as HTML."""
    done = agents.ended(agents.enqueue(kind, more=PAYLOAD))
    task_id = done.task.task_id
    assert PAYLOAD in str(done.requests[0]["body"]["messages"])
    agents.await_job(task_id, 1, status)
    shown = dashboard.job(task_id)
    assert shown["status"] == status
    assert shown["description"] == f"task {task_id}, delivery 1"
    jobs = dashboard.get(f"/0/data/jobs/agents/{status}/50/asc/1.json")[1]
    assert task_id in jobs
    page = dashboard.get(f"/0/view/job/{job_id(task_id, 1)}")[1]
    for text in (json.dumps(shown), jobs, page):
        assert PAYLOAD not in text
        assert "onerror" not in text


def test_requeue_on_the_last_job_of_a_failed_task_retries_the_task(agents: Fleet, dashboard: Dashboard) -> None:
    task_id = failed(agents)
    assert dashboard.press(f"/job/{job_id(task_id, 1)}/requeue") == {"status": "OK"}
    agents.await_status(task_id, Status.SUCCEEDED)
    done = agents.outcome(task_id)
    assert (done.task.delivery, done.task.attempts, done.count("retried"), len(done.requests)) == (2, 2, 1, 2)
    assert agents.await_job(task_id, 2, "finished").return_value() == "succeeded"


def test_a_failed_task_whose_job_comes_back_without_the_button_stays_failed(
    agents: Fleet, dashboard: Dashboard
) -> None:
    """The control: a doubled delivery is no person's wish."""
    task_id = failed(agents)
    before = agents.outcome(task_id)
    agents.redis.rpush("rq:queue:agents", job_id(task_id, 1))
    agents.await_job(task_id, 1, "finished")
    after = agents.outcome(task_id)
    assert (after.task, after.events, after.requests) == (before.task, before.events, before.requests)


def test_requeue_on_an_older_job_does_nothing(agents: Fleet, dashboard: Dashboard) -> None:
    """Delivery 1 failed in RQ's eyes, its horse was killed; the task went on in delivery 2 and has long ended."""
    task_id = agents.enqueue("held")
    agents.await_effect(task_id)
    os.kill(agents.worker_of(task_id)[1], signal.SIGKILL)
    before = agents.ended(task_id, sweeping=True)
    agents.await_job(task_id, 1, "failed")
    agents.await_job(task_id, 2, "finished")
    assert dashboard.press(f"/job/{job_id(task_id, 1)}/requeue") == {"status": "OK"}
    job = agents.await_job(task_id, 1, "finished")
    assert job.return_value() == "nothing to do: stale delivery 1, the current one is 2"
    after = agents.outcome(task_id)
    assert after.problems() == []
    assert (after.task, after.runs, after.requests, after.events) == (
        before.task,
        before.runs,
        before.requests,
        before.events,
    )


def test_empty_queue_and_requeue_all_lose_and_double_no_task(agents: Fleet, dashboard: Dashboard) -> None:
    """J05."""
    with agents.busy(1) as held:
        tasks = [agents.enqueue("short") for _ in range(3)]
        assert len(agents.queued_jobs()) == 3
        assert dashboard.press("/queue/agents/queued/empty") == {"status": "OK"}
        assert agents.queued_jobs() == []
        assert dashboard.press("/requeue/agents")["status"] == "OK"
    for task_id in tasks:
        done = agents.ended(task_id, sweeping=True)
        assert done.problems() == []
        assert (done.task.attempts, done.task.delivery, done.ran["append"]) == (1, 2, 1)
    assert agents.ended(held[0]).problems() == []
