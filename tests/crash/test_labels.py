"""The crash matrix on real processes: a stock worker dies at every crash point, at every passing of it, twice: its
work-horse alone, and the worker with its horse. Another process goes on, and the reconcile table says with what.

One worker per point, all side by side; each test looks at one death. `pytest -k after-effect:3` starts only those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.fleet import SABOTAGE, Fleet
from tests.support.fleet_outcome import Outcome
from tests.support.fleet_workers import Victim, listening
from worker.answers import STATE_UNKNOWN
from worker.crashpoints import POINTS
from worker.state.task import Status

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(300)]

CALLS = ("read", "put", "append", "pay")  # of the first response; one of each nature
MARKED = CALLS[1:]
PASSINGS = {
    "after-claim": 1,
    "after-model-response": 2,
    "after-save-a": 2,
    "after-start-mark": 3,
    "after-effect": 4,
    "after-effect-write": 4,
    "after-save-b": 1,
    "before-finish": 1,
}
CASES = [f"{label}:{n}" for label, count in PASSINGS.items() for n in range(1, count + 1)]
WHO = ("horse", "both")

# What the reconcile table decides for the call that was cut off, and how often its tool has run in the end.
CUT_OFF = {
    "after-start-mark:1": ("put", "rerun", 1),
    "after-start-mark:2": ("append", "unknown", 0),
    "after-start-mark:3": ("pay", "verify: not_happened", 1),
    "after-effect:1": ("read", "run", 2),  # read-only calls have no marker; nobody minds
    "after-effect:2": ("put", "rerun", 2),  # under the same key
    "after-effect:3": ("append", "unknown", 1),
    "after-effect:4": ("pay", "verify: happened", 1),
}


def expected(point: str) -> tuple[dict[str, str], dict[str, int]]:
    """(decision by tool, runs by tool) after a death at the point."""
    label, n = point.split(":")
    decisions, runs = dict.fromkeys(CALLS, "run"), dict.fromkeys(CALLS, 1)
    if label == "after-effect-write":
        decisions |= dict.fromkeys(CALLS[: int(n)], "reuse")
    if point in CUT_OFF:
        call, decision, times = CUT_OFF[point]
        decisions |= dict.fromkeys(CALLS[: CALLS.index(call)], "reuse") | {call: decision}
        runs[call] = times
    return decisions, {call: times for call, times in runs.items() if times}


@dataclass
class Matrix:
    """What became of each death, of a run without any, and of a task that ran beside them all the time."""

    clean: Outcome
    deaths: dict[tuple[str, str], Outcome | AssertionError] = field(default_factory=dict)
    control: Outcome | None = None

    def __getitem__(self, case: tuple[str, str]) -> Outcome:
        found = self.deaths[case]
        if isinstance(found, AssertionError):
            raise found
        return found


class Deaths:
    """All the points' workers; every step is taken at each of them before the next, so that they run side by side."""

    def __init__(self, fleet: Fleet, points: list[str], matrix: Matrix) -> None:
        self.fleet = fleet
        self.matrix = matrix
        self.gate = fleet.home / "rescuers.go"
        self.queues = {point: point.replace(":", ".") for point in points}
        self.victims = {point: fleet.victim(point, queue) for point, queue in self.queues.items()}
        for _ in range(2 if points else 0):
            fleet.worker(*self.queues.values(), FLEET_GATE=str(self.gate))

    def of_the_horse(self) -> None:
        tasks = {point: self.fleet.enqueue("all", queue) for point, queue in self.queues.items()}
        self._each("horse", lambda point, victim: victim.kill_horse())
        self._each("horse", lambda point, victim: self._ended("horse", point, tasks[point]))

    def of_both(self) -> None:
        for victim in self.victims.values():
            victim.once.unlink(missing_ok=True)
        tasks = {point: self.fleet.enqueue("all", queue) for point, queue in self.queues.items()}
        self._each("both", lambda point, victim: victim.kill_both())
        self.gate.touch()  # only now does anybody else listen to these queues
        self._each("both", lambda point, victim: self._ended("both", point, tasks[point]))

    def _ended(self, who: str, point: str, task_id: str) -> None:
        self.matrix.deaths[point, who] = self.fleet.ended(task_id)

    def _each(self, who: str, step: Callable[[str, Victim], None]) -> None:
        for point, victim in self.victims.items():
            try:
                step(point, victim)
            except AssertionError as error:
                self.matrix.deaths.setdefault((point, who), error)


def wanted_points(request: pytest.FixtureRequest) -> list[str]:
    """The points that the tests of this run are about."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    params = {call.params["point"] for call in calls if call and "point" in call.params}
    return [point for point in CASES if point in params]


@pytest.fixture(scope="module")
def matrix(fleet: Fleet, request: pytest.FixtureRequest) -> Matrix:
    fleet.sweeper()
    fleet.worker("control")
    clean, held = fleet.enqueue("all", "control"), fleet.enqueue("held", "control")
    matrix = Matrix(fleet.ended(clean, timeout=120))
    deaths = Deaths(fleet, wanted_points(request), matrix)
    fleet.await_effect(held)
    deaths.of_the_horse()
    deaths.of_both()
    fleet.open_gate(held)
    matrix.control = fleet.ended(held)
    return matrix


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("point", CASES)
def test_after_a_death_the_task_goes_on_as_the_reconcile_table_says(
    matrix: Matrix, verdicts: list[str], point: str, who: str
) -> None:
    done, clean = matrix[point, who], matrix.clean
    decisions, runs = expected(point)
    verdicts.append(line_of(point, who, done))
    assert done.problems() == []
    assert done.decisions == decisions
    assert done.ran == runs
    assert (done.task.attempts, done.task.crashes) == (2, 1)
    (proof,) = [event.data["proof"] for event in done.events if event.kind == "recovered"]
    assert proof.endswith("is gone"), "nobody waited for the lease to run out"
    assert done.progress["turns"] == clean.progress["turns"] == 2
    assert done.progress["totalTokens"] == clean.progress["totalTokens"]
    paid_again = point.startswith("after-model-response")
    assert len(done.requests) == len(clean.requests) + paid_again, "one response, at most, is paid for twice"
    assert done.task.result == clean.task.result == "done"
    for call, result, before in zip(CALLS, done.results, clean.results, strict=True):
        assert result == ((STATE_UNKNOWN, True) if decisions[call] == "unknown" else before)


def test_without_a_death_each_call_runs_once(matrix: Matrix) -> None:
    assert matrix.clean.problems() == []
    assert matrix.clean.ran == dict.fromkeys(CALLS, 1)
    assert (matrix.clean.task.attempts, len(matrix.clean.requests)) == (1, 2)


def test_a_task_that_ran_all_the_while_beside_them_was_left_alone(matrix: Matrix) -> None:
    control = matrix.control
    assert control is not None
    assert control.problems() == []
    assert (control.task.attempts, control.task.crashes, control.task.delivery) == (1, 0, 1)
    assert control.ran == {"append": 1}


def test_every_crash_point_there_is_has_its_place_in_the_matrix() -> None:
    assert set(PASSINGS) == set(POINTS)


def test_a_worker_that_is_told_to_kills_itself_with_sigkill_as_documented(fleet: Fleet) -> None:
    """No CRASH_WAIT, nobody outside: `CRASH_AFTER=after-effect-write:3 rq worker …`, as the README has it."""
    once = fleet.home / "by-itself"
    worker = fleet.worker("alone", CRASH_AFTER="after-effect-write:3", CRASH_ONCE=str(once))
    task_id = fleet.enqueue("all", "alone")
    done = fleet.ended(task_id, sweeping=True, timeout=120)
    worker.expect("signal 9")
    assert done.problems() == []
    assert done.decisions == dict.fromkeys(CALLS[:3], "reuse") | {"pay": "run"}
    assert done.ran == dict.fromkeys(CALLS, 1)


# -- sabotage: with one protection taken away, the tests above would fail ---------------------------------------------


@pytest.mark.parametrize(
    ("sabotage", "point", "ran"),
    [("no-start-marks", "after-effect:3", 2), ("record-first", "after-effect-write:3", 0)],
    ids=["without the start marker the effect happens twice", "recorded before it ran the call is lost"],
)
def test_sabotage(fleet: Fleet, sabotage: str, point: str, ran: int) -> None:
    once: Path = fleet.home / f"{sabotage}.once"
    environ = {"BATON_TOOLS": SABOTAGE, "FLEET_SABOTAGE": sabotage, "CRASH_AFTER": point, "CRASH_ONCE": str(once)}
    listening(fleet.worker(sabotage, **environ))
    done = fleet.ended(fleet.enqueue("all", sabotage), sweeping=True)
    assert once.exists()
    assert done.task.status is Status.SUCCEEDED, "and nobody is told"
    assert done.ran["append"] == ran
    assert done.results[2][1] is False


def line_of(point: str, who: str, done: Outcome) -> str:
    """A line of the table at the end of the run."""
    decided = ", ".join(f"{call}: {done.decisions.get(call)}" for call in CALLS)
    ran = ", ".join(f"{call} {done.ran[call]}" for call in CALLS)
    return f"{point:<22} {who:<5} → {decided} → ran: {ran}"
