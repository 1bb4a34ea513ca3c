"""Redis answers and will not store: full, a replica for a while, unable to save its snapshot; and it throws locks away.

A holder waits for it as long as its own bounds allow. What was not stored has not happened, and nothing happens twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.support.fleet import Fleet
from tests.support.fleet_outcome import Outcome
from tests.support.fleet_own import LEASE_S, OwnServer, claimed_at_s, own_fleet, passing, refused
from tests.support.fleet_proxy import Strait
from tests.support.fleet_workers import listening
from tests.support.waiting import wait_until
from worker.answers import STATE_UNKNOWN
from worker.state.task import Status

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(240)]

WORKERS = 3
UNKNOWN = (STATE_UNKNOWN, True)
REAL = ("appended line", False)
BOTH_REAL = [REAL, ("appended second", False)]


@dataclass
class Place:
    """A fleet whose tasks reach their own server through a strait; RQ itself goes direct."""

    fleet: Fleet
    server: OwnServer
    strait: Strait

    def in_a_tool(self, queue: str | None = None) -> str:
        """A task in the middle of its first call: it has happened, and has not returned. Another call follows."""
        task_id = self.fleet.enqueue("two", queue)
        self.fleet.await_effect(task_id)
        return task_id

    def await_refused(self, code: str, times: int) -> None:
        wait_until(lambda: refused(self.fleet.redis, code) >= times, f"{times} writes to be refused with {code}")

    def ended(self, task_id: str) -> Outcome:
        """The end of the task, with this test as the supervisor of the workers: RQ's end when they may not write."""

        def there() -> bool:
            self.fleet.top_up(WORKERS)
            return self.fleet.status(task_id).ended

        wait_until(there, f"the end of {task_id}\n{self.fleet.logs()}")
        return self.fleet.outcome(task_id)


@pytest.fixture(scope="module")
def started(server_binary: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with own_fleet(tmp_path_factory.mktemp("refuses")) as (fleet, server), Strait(server.url) as strait:
        fleet.variables["BATON_REDIS_URL"] = strait.url
        fleet.top_up(WORKERS)
        fleet.sweeper(BATON_REDIS_URL=server.url).expect("sweeping")
        yield Place(fleet, server, strait)


@pytest.fixture
def place(started: Place) -> Place:
    started.fleet.top_up(WORKERS)
    return started


# -- full --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(started: Place) -> dict[str, Outcome]:
    """F02: the server is full for longer than a lease; it was not when the tasks came to where they are."""
    fleet, server, strait = started.fleet, started.server, started.strait
    hasty = fleet.worker("hasty", BATON_STORE_RETRY_MAX_S="1")
    fleet.worker("hasty", FLEET_GATE=str(fleet.home / "spare.go"))
    fleet.top_up(WORKERS)
    listening(hasty)
    tasks = {"A": fleet.enqueue("short"), "B": fleet.enqueue("short")}
    at_a, at_b = strait.keep("responded", tasks["A"]), strait.keep("answered", tasks["B"])
    tasks |= {"the record of a call": started.in_a_tool(), "hasty": started.in_a_tool("hasty")}
    at_a.await_it()
    at_b.await_it()
    tasks["waiting"] = fleet.enqueue("short")
    with server.full():
        at_a.release()
        at_b.release()
        fleet.open_gate(tasks["hasty"])

        def look() -> None:
            assert fleet.runs(tasks["A"]) == [], "a call ran that is stored nowhere"
            assert {fleet.status(tasks[name]) for name in SAVES} == {Status.RUNNING}

        passing(LEASE_S + 0.5, look)
        before = refused(fleet.redis, "OOM")
        fleet.open_gate(tasks["the record of a call"])
        started.await_refused("OOM", before + 6)
    (fleet.home / "spare.go").touch()  # the supervisor's part: RQ's worker has ended, for it could not write either
    return {name: started.ended(task_id) for name, task_id in tasks.items()}


SAVES = ("A", "the record of a call", "B")


@pytest.mark.parametrize("save", SAVES)
def test_a_save_that_finds_redis_full_is_made_when_there_is_room_again(full: dict[str, Outcome], save: str) -> None:
    """The lease lives on, for a full server still grants PEXPIRE (M7), and so nobody takes the task away."""
    done = full[save]
    assert done.problems() == []
    assert (done.task.attempts, done.task.crashes) == (1, 0)
    assert done.results == (BOTH_REAL if save == "the record of a call" else [REAL])
    assert done.ran == {"append": len(done.results)}


def test_a_holder_whose_patience_ends_first_leaves_a_call_whose_outcome_is_unknown(
    started: Place, full: dict[str, Outcome]
) -> None:
    done = full["hasty"]
    assert done.problems() == []
    assert (done.task.attempts, done.task.crashes) == (2, 1)
    assert done.results == [UNKNOWN, ("appended second", False)]
    assert done.ran == {"append": 2}
    logs = "".join(one.output() for one in started.fleet.processes)
    gave_up = [line for line in logs.splitlines() if "gave-up" in line and done.task.task_id in line]
    assert len(gave_up) == 1
    assert "maxmemory" in gave_up[0], "E14: it says what was wrong"


def test_a_task_that_waits_while_redis_is_full_runs_as_ever(full: dict[str, Outcome]) -> None:
    """The control."""
    done = full["waiting"]
    assert done.problems() == []
    assert (done.task.attempts, done.task.crashes, done.results) == (1, 0, [REAL])


# -- read-only ---------------------------------------------------------------------------------------------------------


def test_a_short_time_as_a_replica_is_waited_for(place: Place) -> None:
    """Beside it, as a control, tasks that stay in their calls and have nothing to write but renewals."""
    with place.fleet.busy(WORKERS - 1) as controls:  # an idle worker of RQ ends when its server becomes a replica
        task_id = place.in_a_tool()
        before = refused(place.fleet.redis, "READONLY")
        with place.server.replica():
            place.fleet.open_gate(task_id)
            place.await_refused("READONLY", before + 3)
        done = place.ended(task_id)
    assert done.problems() == []
    assert (done.task.attempts, done.results) == (1, BOTH_REAL)
    for control in map(place.fleet.outcome, controls):
        assert control.problems() == []
        assert (control.task.attempts, control.results) == (1, [REAL])


def test_after_a_longer_one_nothing_that_may_have_happened_is_believed_not_to_have(
    place: Place, verdicts: list[str]
) -> None:
    """F05. The second call was never marked, and never ran. But a master that was a replica may have forgotten marks,
    so a missing one proves nothing: unknown, not run. A task that waits for a worker is the control."""
    tasks = [place.in_a_tool() for _ in range(WORKERS)]
    waiting = place.fleet.enqueue("short")
    with place.server.replica():
        passing(LEASE_S + 0.5)
    for task_id in tasks:
        place.fleet.open_gate(task_id)
    for done in map(place.ended, tasks):
        assert done.problems() == []
        assert (done.task.attempts, done.task.crashes) == (2, 1)
        assert done.results == [UNKNOWN, UNKNOWN]
        assert done.ran == {"append": 1}
    recovered_at = max(event.at_ms for event in done.events if event.kind == "recovered") / 1000
    wait_s = claimed_at_s(done)[1] - recovered_at
    verdicts.append(f"redis a replica for {LEASE_S + 0.5:g} s: {wait_s:.1f} s after its promotion")
    control = place.ended(waiting)
    assert control.problems() == []
    assert (control.task.attempts, control.results) == (1, [REAL])


def test_a_server_that_cannot_save_its_snapshot_is_waited_for(place: Place) -> None:
    """F07: MISCONF on every write."""
    task_id = place.in_a_tool()
    before = refused(place.fleet.redis, "MISCONF")
    with place.server.unable_to_save():
        place.fleet.open_gate(task_id)
        place.await_refused("MISCONF", before + 3)
    done = place.ended(task_id)
    assert done.problems() == []
    assert (done.task.attempts, done.results) == (1, BOTH_REAL)


# -- locks that vanish -------------------------------------------------------------------------------------------------


def evicted(place: Place, task_id: str) -> None:
    """F01, M6: under `volatile-lru` locks go first: hardly anything else of ours has a ttl."""
    client, lock = place.fleet.redis, place.fleet.store.keys.lock(task_id)
    client.config_set("maxmemory-policy", "volatile-lru")

    def gone() -> bool:
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 1000)
        return not client.exists(lock)

    wait_until(gone, "the lock to be evicted", poll_s=0)
    client.config_set("maxmemory", "0")
    client.config_set("maxmemory-policy", "noeviction")


def deleted(place: Place, task_id: str) -> None:
    assert place.fleet.redis.delete(place.fleet.store.keys.lock(task_id)) == 1


@pytest.mark.parametrize("lose", [evicted, deleted], ids=lambda lose: lose.__name__)
def test_a_lock_that_vanishes_under_its_holder_is_set_again_and_nobody_else_gets_the_task(
    place: Place, lose: Callable[[Place, str], None]
) -> None:
    """D08, D09: the sweeper looks all the while, and another worker is given the task by hand."""
    task_id = place.in_a_tool()
    lock = place.fleet.store.keys.lock(task_id)
    lose(place, task_id)
    place.fleet.redis.rpush("rq:queue:agents", f"{task_id}-1")
    wait_until(lambda: 0 < place.fleet.redis.pttl(lock) <= LEASE_S * 1000, "the lock to be back, with a ttl")
    place.fleet.open_gate(task_id)
    done = place.ended(task_id)
    assert done.problems() == []
    assert (done.task.attempts, done.task.crashes, done.count("claimed")) == (1, 0, 1)
    assert done.results == BOTH_REAL
    assert done.ran == {"append": 2}
