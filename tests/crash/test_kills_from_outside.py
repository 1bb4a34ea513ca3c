"""Workers and work-horses that are killed, stopped and told to go, from outside and at any moment."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.support.fleet import Fleet
from tests.support.fleet_outcome import Outcome
from tests.support.fleet_workers import kill_both, listening
from tests.support.processes import Proc, alive
from tests.support.waiting import wait_until
from worker import proofs
from worker.answers import STATE_UNKNOWN
from worker.state.task import Status
from worker.sweeper import make_sweeper

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(240)]

UNKNOWN = (STATE_UNKNOWN, True)
KILLS = 6

# (a run nobody disturbs, [(seconds after the enqueueing, horses killed, what became of the task)])
Kills = tuple[Outcome, list[tuple[float, int, Outcome]]]


@pytest.fixture
def agents(fleet: Fleet) -> Fleet:
    """Two workers on `agents`, and no sweeper but the test."""
    fleet.top_up(2)
    return fleet


def held_by(fleet: Fleet) -> tuple[str, Proc, int]:
    """(task, worker, horse) in the middle of a side effect: it has happened, and the call has not returned."""
    task_id = fleet.enqueue("held")
    fleet.await_effect(task_id)
    return task_id, *fleet.worker_of(task_id)


def all_of(fleet: Fleet, task_id: str) -> dict[str, bytes]:
    """Every byte that is stored of a task."""
    return {key: fleet.redis.dump(key) for key in fleet.store.keys.of_task(task_id)}  # type: ignore[misc]


# -- in the middle of a tool -------------------------------------------------------------------------------------------


def test_killed_with_its_horse_in_the_middle_of_a_tool_another_worker_goes_on_within_seconds(agents: Fleet) -> None:
    """C12, C14: no restart, no lease to wait for; and with `baton sweep` as a process."""
    sweeper = agents.sweeper()
    sweeper.expect("sweeping")
    bystander = agents.enqueue("held")
    agents.await_effect(bystander)
    agents.top_up(3)
    task_id, worker, _ = held_by(agents)
    assert kill_both(worker) == 1
    killed_at = time.time()
    done = agents.ended(task_id)
    claims = [event.at_ms for event in done.events if event.kind == "claimed"]
    assert claims[1] / 1000 - killed_at < 8 < agents.settings.lease_ttl_ms / 1000
    assert done.problems() == []
    assert done.ran == {"append": 1}
    assert done.results == [UNKNOWN]
    assert (done.task.attempts, done.task.crashes) == (2, 1)
    sweeper.terminate()
    agents.open_gate(bystander)
    control = agents.ended(bystander)
    assert control.problems() == []
    assert (control.task.attempts, control.task.crashes, control.ran["append"]) == (1, 0, 1)


def test_a_horse_that_is_killed_alone_leaves_its_worker_able_to_go_on_with_the_task(agents: Fleet) -> None:
    task_id, worker, horse = held_by(agents)
    os.kill(horse, signal.SIGKILL)
    done = agents.ended(task_id, sweeping=True)
    assert done.problems() == []
    assert done.ran == {"append": 1}
    assert done.results == [UNKNOWN]
    assert agents.await_job(task_id, 1, "failed").latest_result().exc_string.endswith("(signal 9); ")
    assert agents.await_job(task_id, 2, "finished").return_value() == "succeeded"
    worker.assert_running()


def test_a_live_horse_that_is_taken_for_dead_is_fenced_and_does_nothing_twice(
    agents: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweeper whose proof is wrong: wasteful, and no more than that."""
    task_id, _, horse = held_by(agents)
    with monkeypatch.context() as patch:
        patch.setattr(proofs, "is_gone", lambda owner: True)
        assert task_id in agents.sweep().recovered
    done = agents.ended(task_id)
    assert alive(horse)
    before = all_of(agents, task_id)
    agents.open_gate(task_id)
    wait_until(lambda: not alive(horse), "the fenced horse to go")
    assert all_of(agents, task_id) == before
    late = agents.outcome(task_id)
    assert late.problems() == []
    assert late.results == done.results == [UNKNOWN]
    assert (late.task.attempts, late.ran["append"], len(late.requests)) == (2, 1, 2)


def test_a_stopped_horse_wakes_up_fenced_and_changes_nothing(fleet: Fleet) -> None:
    """D04, D12: stopped in the middle of a tool past its lease; another worker finishes; then it goes on."""
    environ = {"BATON_LEASE_TTL_MS": "2000", "BATON_LEASE_MARGIN_MS": "400"}
    fleet.workers(2, "naps", **environ)
    task_id = fleet.enqueue("held", "naps")
    fleet.await_effect(task_id)
    worker, horse = fleet.worker_of(task_id)
    os.kill(horse, signal.SIGSTOP)
    done = fleet.ended(task_id, sweeping=True)
    assert [event.data["proof"] for event in done.events if event.kind == "recovered"] == ["its lease ran out"]
    before = all_of(fleet, task_id)
    fleet.open_gate(task_id)
    os.kill(horse, signal.SIGCONT)
    wait_until(lambda: not alive(horse), "the woken horse to go")
    assert str(fleet.await_job(task_id, 1, "finished").return_value()).startswith("lease lost")
    assert all_of(fleet, task_id) == before
    late = fleet.outcome(task_id)
    assert late.problems() == []
    assert late.results == [UNKNOWN]
    assert (late.task.attempts, late.task.crashes, late.ran["append"], len(late.requests)) == (2, 1, 1, 2)
    worker.assert_running()


# -- told to go --------------------------------------------------------------------------------------------------------


def in_its_second_model_call(fleet: Fleet) -> tuple[str, Proc]:
    task_id = fleet.enqueue("slow")
    text = fleet.task(task_id).text
    wait_until(lambda: len(fleet.requests(text)) == 2, "the second request to reach the model")
    return task_id, fleet.worker_of(task_id)[0]


def test_a_worker_that_is_told_to_go_during_a_model_call_does_not_end_its_task_as_if_a_person_had(
    agents: Fleet,
) -> None:
    """G14: RQ's warm shutdown waits for the horse."""
    task_id, worker = in_its_second_model_call(agents)
    worker.signal(signal.SIGTERM)
    worker.expect("warm shut down requested")
    assert agents.status(task_id) is Status.RUNNING
    assert worker.wait(30) == 0
    done = agents.outcome(task_id)
    assert done.problems() == []
    assert (done.task.attempts, done.ran["append"], len(done.requests)) == (1, 1, 2)


def test_a_second_sigterm_kills_the_horse_and_the_task_goes_on_elsewhere(agents: Fleet) -> None:
    """M19: RQ's cold shutdown leaves its job "started" for good; the task does not depend on that."""
    task_id, worker = in_its_second_model_call(agents)
    worker.signal(signal.SIGTERM)
    worker.expect("warm shut down requested")
    since = time.monotonic()
    wait_until(lambda: time.monotonic() - since > 1.1, "RQ to take a second signal for one: it ignores one too soon")
    worker.signal(signal.SIGTERM)
    worker.wait(30)
    done = agents.ended(task_id, sweeping=True)
    assert done.problems() == []
    assert (done.task.attempts, done.task.crashes, done.ran["append"]) == (2, 1, 1)
    assert len(done.requests) == 3, "the answer that was under way is paid for twice"


# -- at any moment -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seed() -> int:
    return int(os.environ.get("FLEET_SEED") or random.SystemRandom().randrange(10**6))


@pytest.fixture(scope="module")
def random_kills(fleet: Fleet, seed: int) -> Kills:
    """One worker dies in each of six tasks."""
    gate = fleet.home / "random-rescuers.go"
    queues = [f"random-{number}" for number in range(KILLS)]
    timing, *victims = [fleet.worker(queue) for queue in ("timing", *queues)]
    for _ in range(2):
        fleet.worker(*queues, FLEET_GATE=str(gate))
    for worker in (timing, *victims):
        listening(worker)
    clean = fleet.ended(fleet.enqueue("rounds", "timing"))
    took_s = (clean.events[-1].at_ms - clean.events[0].at_ms) / 1000
    chance = random.Random(seed)
    # One in each sixth of the run, so that no part of it is left out by chance.
    moments = [(number + chance.random()) * took_s / KILLS for number in range(KILLS)]
    kills = []
    for queue, victim, moment in zip(queues, victims, moments, strict=True):
        task_id = fleet.enqueue("rounds", queue)
        at = time.monotonic() + moment
        wait_until(lambda at=at: time.monotonic() >= at, "the moment to come", poll_s=0.002)
        kills.append((moment, kill_both(victim), task_id))
    gate.touch()
    return clean, [(at, horses, fleet.ended(task_id, sweeping=True)) for at, horses, task_id in kills]


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_any_moment_the_task_completes_and_nothing_happens_twice(
    random_kills: Kills, seed: int, verdicts: list[str], number: int
) -> None:
    """C04, H15. FLEET_SEED=<seed> chooses the moments."""
    clean, kills = random_kills
    at, horses, done = kills[number]
    told = [content for content, _ in done.results[1::2]]
    shown = ", ".join("unknown" if content == STATE_UNKNOWN else content for content in told)
    verdicts.append(f"seed {seed}: worker and {horses} horse killed after {at:.3f} s → {shown} → {dict(done.ran)}")
    assert done.problems() == []
    assert done.task.attempts == 1 + done.task.crashes <= 2
    assert done.progress["turns"] == clean.progress["turns"] == 4
    assert done.progress["totalTokens"] == clean.progress["totalTokens"]
    assert len(done.requests) <= len(clean.requests) + 1
    ran = [run.what for run in done.runs if run.tool == "append"]
    for line, content in zip(("line 1", "line 2", "line 3"), told, strict=True):
        assert content in (f"appended {line}", STATE_UNKNOWN)
        assert ran.count(line) == 1 or content == STATE_UNKNOWN
    assert told.count(STATE_UNKNOWN) <= 1


def test_without_a_kill_the_three_rounds_are_done_once_each(
    random_kills: Kills,
) -> None:
    clean, _ = random_kills
    assert clean.problems() == []
    assert [run.what for run in clean.runs if run.tool == "append"] == ["line 1", "line 2", "line 3"]
    assert (clean.task.attempts, len(clean.requests)) == (1, 4)


# -- poison ------------------------------------------------------------------------------------------------------------


def test_a_task_that_kills_every_process_that_runs_it_is_dead_after_three_and_holds_up_nobody(fleet: Fleet) -> None:
    """H01, H03: one poisonous task before six good ones, and one worker."""
    listening(fleet.worker("poisoned"))
    poison = fleet.enqueue("poison", "poisoned")
    good = [fleet.enqueue("short", "poisoned") for _ in range(6)]
    done = fleet.ended(poison, sweeping=True)
    assert done.problems(Status.DEAD) == []
    assert (done.task.attempts, done.task.crashes, done.count("claimed")) == (3, 3, 3)
    assert done.ran == {"explode": 3}
    assert len(done.requests) == 1
    assert done.task.reason.startswith("crashed 3 times in a row")
    for task_id in good:
        one = fleet.ended(task_id, sweeping=True)
        assert one.problems() == []
        assert (one.task.attempts, one.task.crashes, one.ran["append"]) == (1, 0, 1)
    delivery = fleet.task(poison).delivery
    for _ in range(20):
        assert not fleet.sweep()
    assert fleet.queued_jobs("poisoned") == []
    assert fleet.task(poison).delivery == delivery


def test_it_is_the_limit_that_stops_it_and_nothing_else(fleet: Fleet) -> None:
    """The control of the poison: with five crashes in a row allowed, it is run five times."""
    listening(fleet.worker("patient"))
    poison = fleet.enqueue("poison", "patient")
    patient = make_sweeper(fleet.settings.model_copy(update={"crashes_in_row_max": 5}))

    def ended() -> bool:
        patient.sweep_once()
        return fleet.status(poison).ended

    wait_until(ended, "the end of the task", timeout=60)
    done = fleet.outcome(poison)
    assert done.problems(Status.DEAD) == []
    assert (done.task.attempts, done.ran["explode"]) == (5, 5)
    patient.store.client.close()
