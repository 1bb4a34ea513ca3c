"""The net between a work-horse and Redis is cut, slow, or swallows everything. A holder that is out of touch for its
whole lease starts nothing more, by its own clock (D10); another goes on; and what arrives late changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ops.valkey import Server
from tests.support.fleet import Fleet, running_fleet
from tests.support.fleet_own import LEASE, LEASE_S, assert_each_worker_takes_a_task, claimed_at_s, passing, stored
from tests.support.fleet_proxy import Strait
from tests.support.fleet_workers import listening
from tests.support.processes import Proc, alive
from tests.support.waiting import wait_until
from worker.answers import STATE_UNKNOWN

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(240)]

UNKNOWN = (STATE_UNKNOWN, True)
BOTH_REAL = [("appended line", False), ("appended second", False)]
SLOW_S = 0.3
WORKERS = 3


class Net:
    """Workers with two ways to Redis each, their tasks' and RQ's own; whoever gets a task, it is its net that fails."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.ways: dict[int, tuple[Strait, Strait]] = {}

    def worker(self, *queues: str, **variables: str) -> Proc:
        tasks, rq = (self.fleet.stack.enter_context(Strait(self.fleet.url)) for _ in range(2))
        worker = self.fleet.worker(*queues, options=("-u", rq.url), BATON_REDIS_URL=tasks.url, **variables)
        self.ways[worker.pid] = tasks, rq
        return worker

    def of(self, task_id: str, what: str) -> tuple[list[Strait], Proc, int]:
        """(what fails for the worker that runs the task, that worker, its work-horse)."""
        worker, horse = self.fleet.worker_of(task_id)
        tasks, rq = self.ways[worker.pid]
        return [tasks, rq] if what == "everything" else [tasks], worker, horse

    def in_a_tool(self, kind: str) -> str:
        task_id = self.fleet.enqueue(kind)
        self.fleet.await_effect(task_id)
        return task_id


@pytest.fixture(scope="module")
def net(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    """Three workers: one for the victim, one for a task that must not notice, one to go on. And a slow one."""
    with running_fleet(tmp_path_factory.mktemp("network"), server.url, **LEASE) as fleet:
        net = Net(fleet)
        slow = net.worker("slow", BATON_LEASE_TTL_MS="15000", BATON_LEASE_MARGIN_MS="2000")
        net.ways[slow.pid][0].delay_s = SLOW_S
        for one in [net.worker() for _ in range(WORKERS)]:
            listening(one)
        fleet.sweeper().expect("sweeping")
        yield net


@pytest.fixture
def control(net: Net) -> Iterator[str]:
    """A task that stays in its call from before the trouble until after it, and then goes on."""
    task_id = net.in_a_tool("two")
    yield task_id
    net.fleet.open_gate(task_id)
    done = net.fleet.ended(task_id)
    assert done.problems() == []
    assert (done.task.attempts, done.task.crashes, done.results) == (1, 0, BOTH_REAL)


@pytest.fixture(scope="module")
def on_its_way(net: Net) -> tuple[str, float]:
    """A task of the slow worker's: it takes its time while other tests run."""
    return net.fleet.enqueue("short", "slow"), time.time()


@pytest.fixture(autouse=True)
def _slow_one_began(on_its_way: tuple[str, float]) -> None:
    """Whichever test is first."""


# -- a black hole ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["tasks", "everything"])
def test_a_holder_that_nothing_reaches_starts_no_further_call_and_another_goes_on(
    net: Net, control: str, verdicts: list[str], what: str
) -> None:
    """For twice the lease. Its first call returns when the lease is over; three more wait in the same answer."""
    fleet, task_id = net.fleet, net.in_a_tool("tools")
    ways, worker, horse = net.of(task_id, what)
    began = time.time()
    for way in ways:
        way.swallow()
    passing(LEASE_S)
    fleet.open_gate(task_id)
    wait_until(lambda: "out of touch" in worker.output(), "the holder to give up by its own clock", timeout=LEASE_S)
    done = fleet.ended(task_id)
    before = stored(fleet, task_id)
    passing(began + 2 * LEASE_S - time.time())
    assert [run.what for run in fleet.runs(task_id) if run.pid == horse] == ["line"]
    for way in ways:
        way.heal()
    wait_until(lambda: not alive(horse), "the old holder to go")
    assert stored(fleet, task_id) == before
    late = fleet.outcome(task_id)
    assert late.problems() == []
    assert late.ran == done.ran == {"append": 2, "read": 1, "put": 1, "pay": 1}
    assert late.results[:2] == [UNKNOWN, ("appended second", False)]
    assert (late.task.attempts, late.task.crashes) == (2, 1)
    assert str(fleet.await_job(task_id, 1, "finished").return_value()).startswith("lease lost")
    verdicts.append(f"{what} black-holed: {claimed_at_s(done)[1] - began:.1f} s (lease {LEASE_S:g} s)")
    assert claimed_at_s(done)[1] - began < LEASE_S + 0.2 + 2, "D12: lease, sweep, and no more"


def test_a_record_that_arrives_when_another_owns_the_task_is_not_written(net: Net, control: str) -> None:
    """The EXEC was on its way when the net went: its WATCH and its reads are from before the takeover."""
    fleet, task_id = net.fleet, net.in_a_tool("two")
    (way,), _, horse = net.of(task_id, "tasks")
    late = way.keep("call-recorded", task_id)
    fleet.open_gate(task_id)
    late.await_it()
    way.swallow()
    done = fleet.ended(task_id)
    before = stored(fleet, task_id)
    late.release()
    way.heal()
    wait_until(lambda: not alive(horse), "the old holder to go")
    assert stored(fleet, task_id) == before
    assert done.problems() == []
    assert (done.task.attempts, done.task.crashes) == (2, 1)
    assert done.results == [UNKNOWN, ("appended second", False)]
    assert fleet.outcome(task_id).ran == {"append": 2}


# -- cut ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["tasks", "everything"])
def test_a_holder_that_is_cut_off_for_a_moment_goes_on(net: Net, control: str, what: str) -> None:
    task_id = net.in_a_tool("two")
    ways, _, _ = net.of(task_id, what)
    for way in ways:
        way.cut()
    passing(0.5)
    assert all(way.cuts for way in ways)
    for way in ways:
        way.heal()
    net.fleet.open_gate(task_id)
    done = net.fleet.ended(task_id)
    assert done.problems() == []
    assert (done.task.attempts, done.task.crashes, done.results) == (1, 0, BOTH_REAL)


def test_a_net_that_is_cut_again_and_again_costs_no_attempt(net: Net, control: str) -> None:
    """Claims, saves, renewals: wherever the task is at that moment."""
    fleet, task_id = net.fleet, net.fleet.enqueue("many")
    fleet.await_effect(task_id)
    (way,), _, _ = net.of(task_id, "tasks")
    before, moments = way.cuts, 0

    def cut_and_healed() -> bool:
        way.cut()
        passing(0.1)
        way.heal()
        passing(0.15)
        return fleet.status(task_id).ended

    while not cut_and_healed():
        moments += 1
    done = fleet.outcome(task_id)
    assert moments >= 3
    assert way.cuts - before >= 6, "connections that were cut or refused"
    assert done.problems() == []
    assert (done.task.attempts, done.task.crashes, len(done.requests)) == (1, 0, 9)
    assert done.ran == {"read": 8, "append": 8}
    assert [content for content, _ in done.results[1::2]] == [f"appended line {number}" for number in range(1, 9)]


# -- slow --------------------------------------------------------------------------------------------------------------


def test_a_slow_net_makes_a_task_slow_and_no_more(net: Net, on_its_way: tuple[str, float]) -> None:
    task_id, began = on_its_way
    done = net.fleet.ended(task_id)
    assert done.problems() == []
    assert (done.task.attempts, done.task.crashes, done.results) == (1, 0, BOTH_REAL[:1])
    took_s = done.events[-1].at_ms / 1000 - began
    assert took_s > 9 * 2 * SLOW_S, "nine transactions, of two messages each"


def test_afterwards_every_worker_takes_tasks(net: Net) -> None:
    assert_each_worker_takes_a_task(net.fleet, WORKERS)
