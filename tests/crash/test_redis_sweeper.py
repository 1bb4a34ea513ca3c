"""The sweeper is killed in the middle of its work, and finds RQ's registries full: the next pass does what is left."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from rq import Queue
from rq.registry import (
    BaseRegistry,
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)

from ops.valkey import Server
from tests.support.fleet import Fleet, running_fleet
from tests.support.fleet_own import stored
from tests.support.fleet_proxy import Strait
from tests.support.waiting import wait_until
from worker.dispatch import job_id, open_store
from worker.state.keys import INDEXES
from worker.state.lease import Holder
from worker.state.task import Status

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash]

LOST, HEALTHY = 200, 5
OWNER = {"host": "elsewhere", "pid": 1}  # nothing but the lease tells whether it lives
REGISTRIES: tuple[type[BaseRegistry], ...] = (
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)


@pytest.fixture
def fleet(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """No workers: what is looked at is what a sweeper makes of tasks."""
    with running_fleet(tmp_path_factory.mktemp("sweeper"), server.url) as fleet:
        yield fleet


def running(fleet: Fleet, number: int, *, lease_ttl_ms: int) -> list[str]:
    """Tasks in the hands of somebody who says nothing more; in the order in which their leases end."""
    brief = {"lease_ttl_ms": lease_ttl_ms, "lease_margin_ms": 100}
    store = open_store(fleet.settings.model_copy(update=brief), fleet.redis)
    tasks = [fleet.enqueue("short") for _ in range(number)]
    for task_id in tasks:
        assert isinstance(store.claim(task_id, 1, OWNER), Holder)
        fleet.redis.lrem("rq:queue:agents", 1, job_id(task_id, 1))
    return tasks


@pytest.mark.parametrize("lost", [False, True], ids=["its-last-write-arrives", "its-last-write-is-lost"])
def test_a_sweeper_that_is_killed_among_its_writes_leaves_the_rest_to_the_next_and_no_lock(
    fleet: Fleet, verdicts: list[str], lost: bool
) -> None:
    """D02: of two hundred tasks it was at the hundred and first. Live ones are the control."""
    healthy = running(fleet, HEALTHY, lease_ttl_ms=60_000)
    tasks = running(fleet, LOST, lease_ttl_ms=300)
    before = {task_id: stored(fleet, task_id) for task_id in healthy}
    keys = set(fleet.redis.scan_iter(count=1000))
    with Strait(fleet.url) as strait:
        last = strait.keep("recovered", tasks[LOST // 2])
        killed = fleet.sweeper(BATON_REDIS_URL=strait.url)
        last.await_it()
        killed.kill()
        killed_at = time.monotonic()
        last.release(lost=lost)
        was_queued = LOST // 2 + (not lost)
        wait_until(lambda: len(fleet.queued_jobs()) == was_queued, f"{was_queued} of the tasks to be queued")
    assert fleet.redis.zcard(fleet.store.keys.index("running")) == HEALTHY + LOST - was_queued

    fleet.sweeper()
    wait_until(lambda: len(fleet.queued_jobs()) >= LOST, "all of them to be queued")
    verdicts.append(f"sweeper killed amid {LOST} lost tasks: all handed on after {time.monotonic() - killed_at:.1f} s")
    assert sorted(fleet.queued_jobs()) == sorted(job_id(task_id, 2) for task_id in tasks)
    for task_id in tasks:
        task = fleet.task(task_id)
        assert (task.status, task.crashes, task.delivery) == (Status.QUEUED, 1, 2)
    assert {task_id: stored(fleet, task_id) for task_id in healthy} == before
    expected = {"rq:queue:agents", *map(fleet.store.keys.index, INDEXES)}
    for task_id in tasks:  # that its lease lapsed is noted among the start markers
        expected |= {f"rq:job:{job_id(task_id, 2)}", fleet.store.keys.started(task_id)}
    new = {key.decode() for key in set(fleet.redis.scan_iter(count=1000)) - keys}
    assert new - expected == set(), "keys of the sweepers' own"


def test_a_sweep_takes_no_notice_of_what_rq_keeps_in_its_registries(fleet: Fleet) -> None:
    """J07: `registry.remove` raises NotImplementedError since RQ 2, so a sweep must not depend on registries at all."""
    (task_id,) = running(fleet, 1, lease_ttl_ms=300)
    ended = fleet.enqueue("short")
    fleet.store.cancel(ended, by="a test")
    queue = Queue("agents", connection=fleet.redis)
    kept = {}
    for registry in REGISTRIES:
        foreign = queue.create_job("operator.add", args=(1, 2))
        foreign.save()
        names = [foreign.id, job_id(task_id, 1), job_id(ended, 1), "gone"]
        if registry is StartedJobRegistry:
            names = [f"{name}:execution" for name in names]
        scores = [1, time.time() - 60, time.time() + 60, float("inf")]
        fleet.redis.zadd(registry(queue=queue).key, dict(zip(names, scores, strict=True)))
        kept[registry(queue=queue).key] = fleet.redis.zrange(registry(queue=queue).key, 0, -1, withscores=True)
    fleet.redis.rpush(queue.intermediate_queue_key, "gone", job_id(ended, 1))
    wait_until(lambda: task_id in fleet.sweep().recovered, "the lost task to be recovered: the sweep did its work")
    assert fleet.queued_jobs() == [job_id(task_id, 2)]
    assert {key: fleet.redis.zrange(key, 0, -1, withscores=True) for key in kept} == kept
