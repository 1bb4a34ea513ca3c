"""Workers that are told to end hand over what they hold, and are gone before their grace is over. Real signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from rq.command import send_shutdown_command, send_stop_execution_command, send_stop_job_command

from ops.valkey import Server
from tests.support.fleet import Fleet, measured, running_fleet
from tests.support.fleet_outcome import Outcome
from tests.support.fleet_workers import START_MAX_S, listening
from tests.support.processes import Proc, alive
from tests.support.waiting import wait_until
from worker.answers import NOT_EXECUTED, STATE_UNKNOWN
from worker.dispatch import STOPPED_BY, job_id
from worker.state.task import Status

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(240)]

GRACE_S = 6.0
FORKING = ("-w", "worker.fleet.ForkWorker")
RESCUER, IDLE = "rescuer", "idle"
WORKERS = ("told", "group", "horse", "hang", "tool", "ponder")
STOCK = "stock"
ROUNDS = [f"line {number}" for number in range(1, 11)]


@dataclass
class Told:
    """A worker that was told to end in the middle of a task, and what became of both."""

    task_id: str
    turns: int = 0  # at that moment
    code: int | None = None  # None: it was not told, only its horse was
    took_s: float = 0.0

    def check(self) -> None:
        assert self.code == 0
        assert self.took_s < GRACE_S


@dataclass
class Drained:
    """What all tests here look at; the signals were sent to all of them side by side."""

    fleet: Fleet
    workers: dict[str, Proc]
    told: dict[str, Told]

    def outcome(self, name: str) -> Outcome:
        return self.fleet.ended(self.told[name].task_id, sweeping=True)


@pytest.fixture(scope="module")
def fleet(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    settings = {"BATON_DRAIN_GRACE_S": str(GRACE_S), "BATON_LEASE_TTL_MS": "4500", "BATON_LEASE_MARGIN_MS": "600"}
    with running_fleet(tmp_path_factory.mktemp("drain"), server.url, **settings, **measured()) as running:
        yield running


@pytest.fixture(scope="module")
def workers(fleet: Fleet) -> dict[str, Proc]:
    """One on each queue, and one on all, which was told to be quiet for now."""
    started = {name: fleet.worker(name, options=FORKING, preload=False) for name in WORKERS}
    started[STOCK] = fleet.worker(STOCK)
    started[RESCUER] = fleet.worker(*WORKERS, STOCK, options=(*FORKING, "-n", RESCUER), preload=False)
    started[IDLE] = fleet.worker(IDLE, options=(*FORKING, "-n", IDLE), preload=False)
    for one in started.values():
        listening(one)
    fleet.redis.sadd(fleet.store.keys.quiet(), RESCUER)
    return started


@pytest.fixture(scope="module")
def drained(fleet: Fleet, workers: dict[str, Proc]) -> Drained:
    """Each worker is told to end at its moment; when they are gone, the rescuer may work."""
    kinds = {"hang": "hangs", "tool": "held", "ponder": "ponders"}
    told = {name: Told(fleet.enqueue(kinds.get(name, "ten"), name)) for name in (*WORKERS, STOCK)}
    moments: dict[str, Callable[[Told], object]] = {
        "hang": lambda one: wait_until(
            lambda: len(fleet.requests(fleet.task(one.task_id).text)) == 2, "the model to be asked again"
        ),
        "tool": lambda one: fleet.await_effect(one.task_id),
        "ponder": lambda one: fleet.await_effect(one.task_id, "ponder"),
    }
    for name, one in told.items():
        moments.get(name, lambda one: fleet.await_effect(one.task_id, times=2))(one)
        one.turns = fleet.views.progress(one.task_id)["turns"] or 0
        if name in ("group", "horse"):
            os.kill(fleet.worker_of(one.task_id)[1], signal.SIGTERM)
        if name != "horse":
            one.took_s = -time.monotonic()
            workers[name].signal(signal.SIGTERM)
    since = time.monotonic()
    wait_until(lambda: time.monotonic() - since > 1.2, "RQ to take another signal for a second one")
    workers["hang"].signal(signal.SIGTERM)
    waiting = [name for name in told if name != "horse"]

    def gone() -> bool:
        fleet.sweep()  # faster than a worker to see that its horse is dead
        for name in [name for name in waiting if workers[name].returncode is not None]:
            told[name].took_s += time.monotonic()
            told[name].code = workers[name].returncode
            waiting.remove(name)
        return not waiting

    wait_until(gone, "the workers to go", timeout=3 * GRACE_S)
    fleet.open_gate(told["ponder"].task_id)
    fleet.redis.srem(fleet.store.keys.quiet(), RESCUER)
    return Drained(fleet, workers, told)


def handed_over_at(done: Outcome) -> int:
    """How many turns the model had answered then. Nothing was lost, done twice, unknown or counted as a crash; no
    answer was paid for twice."""
    assert done.problems() == []
    assert [run.what for run in done.runs if run.tool == "append"] == ROUNDS
    assert [error for _, error in done.results] == [False] * 20
    assert len(done.requests) == 11
    assert (done.task.attempts, done.task.crashes, done.task.hand_overs, done.task.abandoned_calls) == (2, 0, 1, 0)
    kinds = [event.kind for event in done.events]
    return kinds[: kinds.index("handed-over")].count("responded")


@pytest.mark.parametrize("name", ["told", "group"])
def test_a_worker_told_to_end_hands_its_task_over_after_the_step_it_is_in(drained: Drained, name: str) -> None:
    """H07: the worker alone, and with its work-horse as a whole group is told."""
    one = drained.told[name]
    one.check()
    assert one.turns <= handed_over_at(drained.outcome(name)) <= one.turns + 1 < 10


def test_a_horse_that_is_told_alone_hands_its_task_over_and_its_worker_goes_on(drained: Drained) -> None:
    turns = drained.told["horse"].turns
    assert turns <= handed_over_at(drained.outcome("horse")) <= turns + 1 < 10
    drained.workers["horse"].assert_running()


def test_a_stock_worker_drains_too(drained: Drained) -> None:
    """It does not tell its horse, which notices within a third of a lease: some rounds later."""
    drained.told[STOCK].check()
    assert handed_over_at(drained.outcome(STOCK)) < 10


def test_a_model_call_that_hangs_is_abandoned_and_counted_whatever_else_is_signalled(drained: Drained) -> None:
    """M19: RQ takes a second SIGTERM for a reason to kill the horse."""
    drained.told["hang"].check()
    done = drained.outcome("hang")
    assert done.problems() == []
    assert done.ran == {"append": 1}
    assert (done.task.attempts, done.task.crashes, done.task.hand_overs, done.task.abandoned_calls) == (2, 0, 1, 1)
    assert len(done.requests) == 3


def test_a_tool_that_takes_longer_than_the_grace_is_left_to_reconcile_and_is_no_crash(drained: Drained) -> None:
    drained.told["tool"].check()
    done = drained.outcome("tool")
    assert done.problems() == []
    assert (done.ran, done.results) == ({"append": 1}, [(STATE_UNKNOWN, True)])
    assert (done.task.attempts, done.task.crashes, done.task.hand_overs) == (2, 0, 1)
    assert [event.kind for event in done.events if "proof" in event.data] == ["handed-over"]


def test_an_interruptible_tool_is_run_anew_as_if_it_had_never_started(drained: Drained) -> None:
    one, done = drained.told["ponder"], drained.outcome("ponder")
    one.check()
    assert one.took_s < GRACE_S / 2, "it was waited for"
    assert done.problems() == []
    assert (done.ran, done.results) == ({"ponder": 2, "append": 1}, [("appended it", False)])
    assert (done.task.attempts, done.task.crashes, done.task.hand_overs) == (2, 0, 1)


# -- stopped in RQ -----------------------------------------------------------------------------------------------------


def stop(
    fleet: Fleet, kind: str, queue: str, moment: Callable[[str], object], *, by_execution: bool = False
) -> Outcome:
    task_id = fleet.enqueue(kind, queue)
    moment(task_id)
    horse = int(fleet.task(task_id).owner["pid"])
    if by_execution:
        [execution] = fleet.job(task_id).get_executions()
        send_stop_execution_command(fleet.redis, job_id(task_id, 1), execution.id)
    else:
        send_stop_job_command(fleet.redis, job_id(task_id, 1))
    done = fleet.ended(task_id, timeout=3 * GRACE_S)  # nobody sweeps
    wait_until(lambda: not alive(horse), "the horse to go")
    assert done.problems(Status.CANCELLED) == []
    assert (done.task.reason, done.task.crashes, done.task.attempts) == (STOPPED_BY, 0, 1)
    return done


def test_a_job_stopped_in_rq_is_a_cancelled_task_with_a_valid_history(drained: Drained) -> None:
    """By our worker, in order: the tool that can be interrupted is told, and what it says is kept."""
    fleet = drained.fleet
    done = stop(fleet, "ponders", "horse", lambda task_id: fleet.await_effect(task_id, "ponder"))
    assert (done.ran, done.results) == ({"ponder": 1}, [(NOT_EXECUTED, True)])
    fleet.await_job(done.task.task_id, 1, "finished")
    fleet.store.retry(done.task.task_id, by="a person")
    after = fleet.ended(done.task.task_id)
    assert (after.task.status, after.ran) == (Status.SUCCEEDED, {"ponder": 1}), "the history was not valid"
    drained.workers["horse"].assert_running()


@pytest.mark.parametrize("options", [FORKING, ()], ids=["ours", "stock"])
def test_a_tool_that_does_not_listen_is_killed_by_a_stop_and_reconciled_by_a_retry(
    drained: Drained, options: tuple[str, ...]
) -> None:
    fleet = drained.fleet
    queue = "horse" if options else "stopped"
    if not options:
        listening(fleet.worker(queue))
    done = stop(fleet, "held", queue, fleet.await_effect, by_execution=bool(options))
    assert (done.ran, done.progress["turns"]) == ({"append": 1}, 1)
    fleet.await_job(done.task.task_id, 1, "stopped")
    fleet.store.retry(done.task.task_id, by="a person")
    after = fleet.ended(done.task.task_id)
    assert (after.task.status, after.ran) == (Status.SUCCEEDED, {"append": 1})
    assert after.results == [(STATE_UNKNOWN, True)]


# -- idle, and quiet ---------------------------------------------------------------------------------------------------


def test_a_quiet_worker_takes_nothing_and_goes_on_when_it_may(drained: Drained) -> None:
    """It was blocked for jobs when it was told: what it is given then goes back to the front."""
    fleet, rescuer = drained.fleet, drained.workers[RESCUER]
    for name in WORKERS:
        drained.outcome(name)
    fleet.redis.sadd(fleet.store.keys.quiet(), RESCUER)
    first, second = fleet.enqueue("short", "told"), fleet.enqueue("short", "told")
    wait_until(lambda: fleet.redis.hget(f"rq:worker:{RESCUER}", "state") == b"suspended", "it to be quiet")
    assert fleet.queued_jobs("told") == [job_id(first, 1), job_id(second, 1)]
    assert fleet.task(first).attempts == 0
    fleet.redis.srem(fleet.store.keys.quiet(), RESCUER)
    assert fleet.ended(first).problems() == fleet.ended(second).problems() == []
    rescuer.assert_running()


def test_an_idle_worker_ends_at_once_with_code_0_also_by_rqs_shutdown_command(
    fleet: Fleet, workers: dict[str, Proc]
) -> None:
    began = time.monotonic()
    send_shutdown_command(fleet.redis, IDLE)
    assert workers[IDLE].wait(START_MAX_S) == 0
    assert time.monotonic() - began < GRACE_S / 2
