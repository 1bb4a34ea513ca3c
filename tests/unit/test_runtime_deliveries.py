"""Deliveries are wake-ups: lost, doubled, stale or requeued by hand, they start nothing that should not start."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from rq import Queue
from rq.registry import FailedJobRegistry

from tests.support.agents import Bench, Died, T, calls, say, use
from worker import jobs
from worker.dispatch import job_id
from worker.errors import TaskFailed
from worker.runtime import Runtime
from worker.state.task import Status

SEND = use("send", line="a")
REFUSED = say("no", "refusal")


def started(*steps: Any, **options: Any) -> Bench:
    bench = Bench(*steps, **options)
    bench.enqueue()
    return bench


def no_model(settings: Any) -> Any:
    raise AssertionError("a model was made")


# -- stale and doubled ---------------------------------------------------------------------------------------------


def test_a_delivery_of_an_unknown_task_has_nothing_to_do() -> None:
    assert Bench().runtime().attempt("never-seen", 1).startswith("nothing to do: no such task")


def test_a_stale_delivery_does_nothing_and_makes_no_model() -> None:
    bench = started(calls(SEND), say())
    with bench.dying(("after-save-a", 1)), pytest.raises(Died):
        bench.deliver()
    bench.take_over()
    runtime = bench.runtime()
    runtime.make_model = no_model
    assert runtime.attempt(T, 1) == "nothing to do: stale delivery 1, the current one is 2"
    assert bench.effects == []
    assert bench.run() is Status.SUCCEEDED


@pytest.mark.parametrize("ended", [Status.SUCCEEDED, Status.CANCELLED])
def test_a_doubled_delivery_of_an_ended_task_does_nothing(ended: Status) -> None:
    """B11."""
    bench = started(calls(SEND), say())
    if ended is Status.CANCELLED:
        bench.store.cancel(T, by="ann")
    else:
        bench.run()
    asked = len(bench.model.log)
    assert bench.deliver() == f"nothing to do: the task is {ended}"
    assert bench.status() is ended
    assert len(bench.model.log) == asked


def test_a_second_delivery_while_the_first_runs_does_nothing() -> None:
    """B10: from inside the first one's model call."""
    said: list[str] = []

    def ask(body: Any, watch: Any) -> Any:
        said.append(bench.deliver())
        return say()

    bench = started(ask)
    assert bench.deliver() == "succeeded"
    assert said == ["nothing to do: the task is running"]
    assert len(bench.model.log) == 1


def test_of_many_deliveries_at_once_one_runs() -> None:
    bench = started(calls(SEND), say())
    together = threading.Barrier(5, timeout=60)
    said: list[str] = []
    runtimes = [bench.runtime() for _ in range(5)]

    def deliver(runtime: Runtime) -> None:
        together.wait()
        said.append(runtime.attempt(T, 1))

    threads = [threading.Thread(target=deliver, args=(runtime,)) for runtime in runtimes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(said) == 5
    assert said.count("succeeded") == 1
    assert all(words == "succeeded" or words.startswith("nothing to do") for words in said)
    assert bench.effects == ["send a"]
    assert len(bench.model.log) == 2


# -- requeued by hand ----------------------------------------------------------------------------------------------


def failed_jobs(bench: Bench) -> FailedJobRegistry:
    return FailedJobRegistry(queue=Queue(bench.settings.queue, connection=bench.store.client))


def rq_fails_the_job(bench: Bench) -> None:
    """What RQ does with a job that raised."""
    bench.store.client.zadd(failed_jobs(bench).key, {job_id(T, bench.task().delivery): 1})


def requeue_by_hand(bench: Bench) -> None:
    """What rq-dashboard's button does: off the list of failed jobs, and onto the queue."""
    bench.store.client.zrem(failed_jobs(bench).key, job_id(T, bench.task().delivery))


def test_a_failed_task_shows_as_a_failed_job() -> None:
    bench = started(REFUSED)
    with pytest.raises(TaskFailed, match="task t1 failed: refused"):
        bench.runtime().attempt(T, 1)


def test_a_doubled_delivery_does_not_retry_a_failed_task() -> None:
    bench = started(REFUSED)
    bench.deliver()
    rq_fails_the_job(bench)
    assert bench.deliver() == "nothing to do: the task is failed"
    assert bench.status() is Status.FAILED
    assert len(bench.model.log) == 1


@pytest.mark.parametrize("ended", [Status.FAILED, Status.DEAD])
def test_a_job_that_a_person_requeued_in_rqs_dashboard_retries_the_task(ended: Status) -> None:
    bench = started([REFUSED, say("yes")] if ended is Status.FAILED else [*[KeyError("x")] * 3, say("yes")])
    while bench.status() is Status.QUEUED:
        try:
            bench.deliver()
        except KeyError:
            continue
    assert bench.status() is ended
    rq_fails_the_job(bench)
    requeue_by_hand(bench)
    number = bench.task().delivery
    assert bench.deliver() == (
        f"the task is {ended}, and its job was requeued by hand: retried as delivery {number + 1}"
    )
    assert bench.run() is Status.SUCCEEDED
    assert bench.task().result == "yes"


def test_a_stale_job_that_a_person_requeued_does_nothing() -> None:
    bench = started([REFUSED, REFUSED])
    bench.deliver()
    bench.store.retry(T, by="ann")
    bench.deliver()
    assert bench.status() is Status.FAILED
    assert bench.deliver(delivery=1).startswith("nothing to do: stale delivery 1")


# -- the way in ----------------------------------------------------------------------------------------------------


def test_the_job_that_rq_stores_runs_the_task_with_the_processes_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = started(say("hello"))
    runtime = bench.runtime()
    monkeypatch.setattr("worker.runtime.Runtime", lambda settings, **options: runtime)
    assert jobs.run_task(T, 1) == "succeeded"


def test_an_attempt_opens_one_connection_for_the_runner_and_one_for_the_heartbeat() -> None:
    """D13: what the heartbeat does in its thread never meets what the runner is in the middle of."""
    bench = started(say())
    opened: list[Any] = []
    runtime = bench.runtime()
    make_store = runtime.make_store
    runtime.make_store = lambda settings: opened.append(make_store(settings)) or opened[-1]  # type: ignore[func-returns-value]
    assert runtime.attempt(T, 1) == "succeeded"
    assert len({id(store.client.connection_pool) for store in opened}) == 2


def test_by_default_the_model_is_claude_and_the_tools_are_those_of_the_settings() -> None:
    from worker.model import Claude

    runtime = Runtime(Bench().settings)
    assert isinstance(runtime.make_model(runtime.settings), Claude)
    assert "send_email" in {tool.name for tool in runtime.make_toolbox(runtime.settings)}
