"""Redis is killed with -9 in the middle of tasks and comes back with its data: after a moment, or when every lease has
long run out. Tasks complete, nothing is done twice, and no worker lives on without taking jobs (C11, M22).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.fleet import Fleet
from tests.support.fleet_outcome import Outcome
from tests.support.fleet_own import (
    CLASSES,
    LEASE_S,
    OwnServer,
    assert_each_worker_takes_a_task,
    claimed_at_s,
    ended_workers,
    own_fleet,
    passing,
    stored,
)
from tests.support.waiting import wait_until
from worker.answers import STATE_UNKNOWN

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(240)]

WORKERS = 2
AWAY_S = {"short": 0.4, "long": LEASE_S * 1.2}
UNKNOWN = (STATE_UNKNOWN, True)


@dataclass
class Outage:
    """What became of a task in a tool, one in a model call, and one that waited; and of the workers."""

    tool: Outcome
    model: Outcome
    waiting: Outcome
    back_at: float
    away_s: float
    untouched: bool  # a task that had ended before
    exits: list[int]


@pytest.fixture(scope="module", params=CLASSES)
def own(
    request: pytest.FixtureRequest, server_binary: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, OwnServer]]:
    home = tmp_path_factory.mktemp("restarts")
    with own_fleet(home, **CLASSES[request.param]) as (fleet, server):
        fleet.top_up(WORKERS)
        fleet.sweeper().expect("sweeping")
        yield fleet, server


def restarted(own: tuple[Fleet, OwnServer], away_s: float) -> Outage:
    fleet, server = own
    fleet.top_up(WORKERS)
    before = fleet.ended(fleet.enqueue("short")).task.task_id
    fleet.await_job(before, 1, "finished")
    kept = stored(fleet, before)
    tool, model = fleet.enqueue("two"), fleet.enqueue("slow")
    fleet.await_effect(tool)
    text = fleet.task(model).text
    wait_until(lambda: len(fleet.requests(text)) == 2, "the second request to reach the model")
    waiting = fleet.enqueue("short")
    known = len(ended_workers(fleet, "agents"))

    server.kill()
    killed_at = time.monotonic()
    passing(away_s)
    server.start()
    back_at, away_s = time.time(), time.monotonic() - killed_at
    fleet.open_gate(tool)
    # The test is the supervisor: a worker that ends is replaced, one that lives is not.
    wait_until(
        lambda: fleet.top_up(WORKERS) and all(fleet.status(one).ended for one in (tool, model, waiting)),
        f"all three tasks to end\n{fleet.logs()}",
    )
    exits = [one.returncode for one in ended_workers(fleet, "agents")[known:] if one.returncode is not None]
    done = [fleet.outcome(one) for one in (tool, model, waiting)]
    return Outage(*done, back_at, away_s, stored(fleet, before) == kept, exits)


@pytest.fixture(scope="module")
def short(own: tuple[Fleet, OwnServer]) -> Outage:
    return restarted(own, AWAY_S["short"])


@pytest.fixture(scope="module")
def long(own: tuple[Fleet, OwnServer]) -> Outage:
    return restarted(own, AWAY_S["long"])


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("length", AWAY_S)
def test_every_task_completes_and_none_has_an_effect_twice(request: pytest.FixtureRequest, length: str) -> None:
    outage: Outage = request.getfixturevalue(length)
    for done in (outage.tool, outage.model, outage.waiting):
        assert done.problems() == []
        assert done.task.crashes <= 1
    assert outage.tool.ran == {"append": 2}
    assert outage.model.ran == outage.waiting.ran == {"append": 1}


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("length", AWAY_S)
def test_what_was_not_being_worked_on_is_as_it_was(request: pytest.FixtureRequest, length: str) -> None:
    """The controls: a task that had ended, and one that waited for a worker."""
    outage: Outage = request.getfixturevalue(length)
    assert outage.untouched
    assert (outage.waiting.task.attempts, outage.waiting.task.crashes) == (1, 0)
    assert outage.waiting.results == [("appended line", False)]


def test_a_holder_outlives_a_restart_that_is_shorter_than_its_lease(short: Outage) -> None:
    assert short.away_s < LEASE_S - 0.3, "else the test shows nothing"
    for done in (short.tool, short.model):
        assert (done.task.attempts, done.task.crashes) == (1, 0), done.events
    assert short.tool.results == [("appended line", False), ("appended second", False)]
    assert len(short.model.requests) == 2


def test_after_a_longer_one_another_worker_goes_on_and_trusts_a_server_that_forgets_nothing(
    long: Outage, verdicts: list[str]
) -> None:
    """The call that was running may have happened. The next one was never marked, and `appendfsync always` makes a
    missing mark a proof after a restart, too: it is run."""
    assert long.away_s > LEASE_S
    for done in (long.tool, long.model):
        assert (done.task.attempts, done.task.crashes) == (2, 1), done.events
    assert long.tool.results == [UNKNOWN, ("appended second", False)]
    assert len(long.model.requests) == 3, "the answer that was under way is paid for twice"
    for what, done in (("tool", long.tool), ("model call", long.model)):
        verdicts.append(
            f"redis killed for {long.away_s:.1f} s in a {what}: {claimed_at_s(done)[1] - long.back_at:.1f} s"
        )


@pytest.mark.parametrize("length", AWAY_S)
def test_afterwards_each_worker_takes_jobs_or_has_ended_with_an_error(
    own: tuple[Fleet, OwnServer], request: pytest.FixtureRequest, length: str
) -> None:
    """C11. A worker that ends with 0 would be left alone by a supervisor that restarts on failure."""
    outage: Outage = request.getfixturevalue(length)
    assert all(outage.exits), outage.exits
    assert_each_worker_takes_a_task(own[0], WORKERS)
