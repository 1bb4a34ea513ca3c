"""Each way for a process to die: who notices, by which proof, and how soon; and what else dies with it.

The seconds from the kill to the next claim are printed at the end of the run, one line for each kind of death.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.fleet import Fleet
from tests.support.fleet_outcome import Outcome
from tests.support.fleet_workers import horses, kill_both
from tests.support.processes import Proc, alive
from tests.support.waiting import wait_until
from worker import proofs
from worker.answers import STATE_UNKNOWN
from worker.state.task import Status
from worker.sweeper import make_sweeper

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(240)]

UNKNOWN = (STATE_UNKNOWN, True)
REAL = ("appended line", False)
FORKING = ("-w", "worker.fleet.ForkWorker")
SOON_S = 8  # about one second on an idle machine; far below the lease of 15 s on any


class Deaths:
    """Kills, and what is said about them."""

    def __init__(self, fleet: Fleet, verdicts: list[str]) -> None:
        self.fleet = fleet
        self.verdicts = verdicts

    @contextmanager
    def beside_a_healthy_task(self) -> Iterator[None]:
        """The control: held by another worker all the while, and untouched."""
        with self.fleet.busy(1, "control") as (control,):
            yield
        outcome = self.fleet.outcome(control)
        assert outcome.problems() == []
        assert (outcome.task.attempts, outcome.task.crashes, outcome.ran) == (1, 0, {"append": 1})

    def told(self, kind: str, killed_at: float, outcome: Outcome, proof: str) -> float:
        """Seconds to the next claim, which the table gets; checks by which proof the task was taken."""
        claims = [event.at_ms / 1000 for event in outcome.events if event.kind == "claimed"]
        words = [event.data["proof"] for event in outcome.events if event.kind == "recovered"]
        assert len(words) == 1
        assert proof in words[0]
        assert outcome.problems() == []
        assert (outcome.task.attempts, outcome.task.crashes) == (2, 1)
        seconds = claims[1] - killed_at
        self.verdicts.append(f"recovered after {seconds:5.2f} s: {kind} ({words[0]})")
        return seconds


@pytest.fixture(scope="module", autouse=True)
def control_worker(fleet: Fleet) -> None:
    fleet.worker("control")


@pytest.fixture
def deaths(fleet: Fleet, verdicts: list[str]) -> Deaths:
    return Deaths(fleet, verdicts)


@pytest.fixture(scope="module")
def agents(fleet: Fleet) -> Fleet:
    """Two stock workers on `agents`."""
    fleet.top_up(2)
    return fleet


def in_a_side_effect(fleet: Fleet, queue: str | None = None) -> tuple[str, Proc, int]:
    """(task, worker, horse): it has happened, and the call has not returned."""
    task_id = fleet.enqueue("held", queue)
    fleet.await_effect(task_id)
    return task_id, *fleet.worker_of(task_id)


def in_a_model_call(fleet: Fleet, queue: str | None = None) -> tuple[str, Proc, int]:
    """(task, worker, horse): its only side effect is recorded, it waits for the model."""
    task_id = fleet.enqueue("slow", queue)
    wait_until(lambda: len(fleet.requests(fleet.task(task_id).text)) == 2, "the second request")
    return task_id, *fleet.worker_of(task_id)


# -- 1: the parent reaps ---------------------------------------------------------------------------------------------


def test_a_worker_of_ours_hands_its_killed_horses_task_on_by_itself_with_no_sweeper_at_all(
    fleet: Fleet, deaths: Deaths
) -> None:
    fleet.workers(1, "ours", options=FORKING, preload=False)
    with deaths.beside_a_healthy_task():
        task_id, worker, horse = in_a_side_effect(fleet, "ours")
        killed_at = time.time()
        os.kill(horse, signal.SIGKILL)
        outcome = fleet.ended(task_id)
    assert deaths.told("work-horse of a ForkWorker, no sweeper", killed_at, outcome, "signal 9") < SOON_S
    assert outcome.ran == {"append": 1}
    assert outcome.results == [UNKNOWN]
    worker.assert_running()


def test_a_horse_of_ours_that_ends_by_itself_costs_its_task_nothing(fleet: Fleet) -> None:
    """The control: whoever is reaped is not always dead too early."""
    fleet.top_up(0)
    fleet.workers(1, "fine", options=FORKING, preload=False)
    task_id = fleet.enqueue("short", "fine")
    outcome = fleet.ended(task_id)
    assert outcome.problems() == []
    assert (outcome.task.attempts, outcome.task.crashes, outcome.results) == (1, 0, [REAL])
    assert fleet.await_job(task_id, 1, "finished").return_value() == "succeeded"


# -- 2: its process is gone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["horse", "worker", "both"])
def test_a_sweeper_on_the_same_host_sees_that_the_process_is_gone(agents: Fleet, deaths: Deaths, kind: str) -> None:
    """`worker`: RQ leaves the work-horse of a killed worker running; ours dies with it."""
    agents.top_up(2)
    with agents.sweeper() as sweeper, deaths.beside_a_healthy_task():
        sweeper.expect("sweeping")
        task_id, worker, horse = in_a_side_effect(agents)
        killed_at = time.time()
        if kind == "horse":
            os.kill(horse, signal.SIGKILL)
        elif kind == "worker":
            worker.kill()
        else:
            kill_both(worker)
        outcome = agents.ended(task_id)
    assert not alive(horse)
    label = {"horse": "work-horse", "worker": "worker alone", "both": "worker and work-horse"}[kind]
    assert deaths.told(f"{label} of a stock worker", killed_at, outcome, "is gone") < SOON_S
    assert outcome.ran == {"append": 1}
    assert outcome.results == [UNKNOWN]


@pytest.mark.parametrize("options", [(), FORKING], ids=["stock", "ours"])
def test_a_horse_dies_with_its_worker_before_it_can_do_anything_more(fleet: Fleet, options: tuple[str, ...]) -> None:
    """M10, with the gate open: an orphan would come back from its tool, record the result and go on."""
    queue = f"orphans-{len(options)}"
    fleet.workers(1, queue, options=options, preload=not options)
    task_id, worker, horse = in_a_side_effect(fleet, queue)
    worker.kill()
    wait_until(lambda: not alive(horse), "the horse to die with its worker")
    fleet.open_gate(task_id)
    assert fleet.status(task_id) is Status.RUNNING
    assert fleet.outcome(task_id).count("call-recorded") == 0
    fleet.sweep()
    fleet.workers(1, queue)
    outcome = fleet.ended(task_id)
    assert outcome.problems() == []
    assert (outcome.ran, outcome.results) == ({"append": 1}, [UNKNOWN])


def test_a_whole_host_that_dies_is_taken_over_by_another(fleet: Fleet, deaths: Deaths) -> None:
    """Workers, horses and sweeper of one host in the same moment; nothing is left there to notice."""
    here = fleet.workers(2, "host")
    own_sweeper = fleet.sweeper()
    own_sweeper.expect("sweeping")
    tasks = [in_a_side_effect(fleet, "host")[0] for _ in range(2)]
    everything = [*here, own_sweeper]
    found = [horse for one in here for horse in horses(one)]
    fleet.workers(2, "host")  # all the first host's workers are busy
    with fleet.sweeper() as sweeper:
        sweeper.expect("sweeping")
        killed_at = time.time()
        for pid in [*(one.pid for one in everything), *found]:
            os.kill(pid, signal.SIGKILL)
        for task_id in tasks:
            outcome = fleet.ended(task_id)
            deaths.told("whole host, taken over by another", killed_at, outcome, "is gone")
            assert (outcome.ran, outcome.results) == ({"append": 1}, [UNKNOWN])


# -- 3: its connection is gone -----------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeper is on another host: it cannot look at processes."""
    monkeypatch.setattr(proofs, "is_gone", lambda owner: False)


def test_a_sweeper_on_another_host_sees_that_the_connection_is_gone(
    agents: Fleet, deaths: Deaths, elsewhere: None
) -> None:
    agents.top_up(2)
    sweeper = make_sweeper(agents.settings)
    with deaths.beside_a_healthy_task():
        task_id, worker, _ = in_a_model_call(agents)
        killed_at = time.time()
        kill_both(worker)
        wait_until(lambda: task_id in sweeper.sweep_once().recovered, "the recovery", timeout=30)
        outcome = agents.ended(task_id)
    assert deaths.told("worker and work-horse of another host", killed_at, outcome, "its connection") < SOON_S
    assert (outcome.ran, outcome.results) == ({"append": 1}, [REAL])


def test_a_stopped_process_keeps_its_connection_and_its_task(agents: Fleet, elsewhere: None) -> None:
    """The control: nothing is proven by a process that does nothing. Its lease runs out in time."""
    agents.top_up(2)
    sweeper = make_sweeper(agents.settings)
    task_id, _, horse = in_a_model_call(agents)
    os.kill(horse, signal.SIGSTOP)
    try:
        until = time.monotonic() + 2 * proofs.GRACE_S
        while time.monotonic() < until:
            assert task_id not in sweeper.sweep_once().recovered
    finally:
        os.kill(horse, signal.SIGCONT)
    outcome = agents.ended(task_id)
    assert (outcome.problems(), outcome.task.attempts) == ([], 1)


def test_a_death_in_a_side_effect_on_another_host_waits_for_the_lease(
    fleet: Fleet, deaths: Deaths, elsewhere: None
) -> None:
    """Nobody can see from there whether the call goes on; a process that was merely cut off may yet record it."""
    ttl_s = 3.0
    environ = {"BATON_LEASE_TTL_MS": f"{ttl_s * 1000:.0f}", "BATON_LEASE_MARGIN_MS": "400"}
    fleet.workers(2, "far", **environ)
    sweeper = make_sweeper(fleet.settings)
    task_id, worker, _ = in_a_side_effect(fleet, "far")
    killed_at = time.time()
    kill_both(worker)
    wait_until(lambda: task_id in sweeper.sweep_once().recovered, "the recovery", timeout=30)
    outcome = fleet.ended(task_id)
    took = deaths.told(f"in a side effect on another host, lease of {ttl_s:g} s", killed_at, outcome, "lease ran out")
    assert took < ttl_s + SOON_S
    assert (outcome.ran, outcome.results) == ({"append": 1}, [UNKNOWN])


def _unshare() -> list[str]:
    """A command that runs another in a pid namespace of its own; empty where that is not allowed."""
    for options in (["--pid", "--fork"], ["--user", "--map-root-user", "--pid", "--fork"]):
        if program := shutil.which("unshare"):
            command = [program, *options, "--kill-child"]
            if subprocess.run([*command, "true"], check=False, capture_output=True, timeout=20).returncode == 0:
                return command
    return []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pid namespaces are Linux's")
def test_a_sweeper_in_a_container_of_its_own_sees_it_too(agents: Fleet, deaths: Deaths) -> None:
    """No function is replaced here: the pids it is told of mean nothing in its namespace."""
    if not (command := _unshare()):
        pytest.skip("this machine allows no pid namespaces")
    agents.top_up(2)
    program = Path(sys.executable).with_name("baton")
    sweeper = Proc([*command, program, "sweep"], log=agents.home / "contained.log", env=agents.environment())
    with sweeper, deaths.beside_a_healthy_task():
        sweeper.expect("sweeping")
        task_id, worker, _ = in_a_model_call(agents)
        killed_at = time.time()
        kill_both(worker)
        outcome = agents.ended(task_id)
    assert deaths.told("worker and work-horse, sweeper in a container", killed_at, outcome, "its connection") < SOON_S
    assert (outcome.ran, outcome.results) == ({"append": 1}, [REAL])
