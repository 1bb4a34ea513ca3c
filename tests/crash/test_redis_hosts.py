"""A whole host is lost at once, workers, work-horses and sweeper; and a burst of tasks that people take back, with a
listener on RQ's channels that hears nothing.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from ops.valkey import Server
from tests.state.kit import Watched, monitored
from tests.support.fleet import Fleet, running_fleet
from tests.support.fleet_outcome import Outcome
from tests.support.fleet_own import LEASE, LEASE_S, claimed_at_s
from tests.support.fleet_workers import START_MAX_S, listening
from tests.support.processes import Proc, alive
from tests.support.waiting import wait_until
from worker.answers import STATE_UNKNOWN
from worker.errors import WrongState
from worker.state.task import Status

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(240)]

WORKERS, TAKEN_BACK, KEPT = 3, 60, 15
SWEEP_S = 0.2
AFTER_UNKNOWN = [(STATE_UNKNOWN, True), ("appended second", False)]
BOTH_REAL = [("appended line", False), ("appended second", False)]

# -- a lost host -------------------------------------------------------------------------------------------------------


@dataclass
class Lost:
    """`near`: its particulars are those of this host. `far`: they are another host's, on which nobody can look."""

    near: Outcome
    far: Outcome
    control: Outcome
    at: float


@pytest.fixture(scope="module")
def fleet(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("hosts"), server.url, **LEASE) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def lost(fleet: Fleet) -> Lost:
    """One host has two workers and a sweeper; the other one begins when both have a task in a call."""
    gate = fleet.home / "survivors.go"
    doomed = host_of(fleet)
    survivors = [fleet.worker(FLEET_GATE=str(gate)) for _ in range(WORKERS)]
    wait_until(lambda: doomed.output().count("Listening on") == 2, "the first host to work", timeout=START_MAX_S)
    near, far = fleet.enqueue("two"), fleet.enqueue("two")
    for task_id in (near, far):
        fleet.await_effect(task_id)
    move_elsewhere(fleet, far)
    gate.touch()
    for one in survivors:
        listening(one)
    fleet.sweeper().expect("sweeping")
    control = fleet.enqueue("two")
    fleet.await_effect(control)

    everything = [doomed.pid, *doomed.descendants()]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none sees another one die
        for pid in everything:
            with suppress(ProcessLookupError):  # a work-horse dies with its worker
                os.kill(pid, number)
    at = time.time()
    wait_until(lambda: not any(map(alive, everything)), "all of the host to be gone")
    done = [fleet.ended(task_id) for task_id in (near, far)]
    fleet.open_gate(control)
    return Lost(*done, fleet.ended(control), at)


def host_of(fleet: Fleet) -> Proc:
    """Two workers and a sweeper in one session."""
    programs = Path(sys.executable).parent
    worker = shlex.join([str(programs / "rq"), "worker", fleet.queue, "-u", fleet.url])
    sweeper = shlex.join([str(programs / "baton"), "sweep"])
    environ = fleet.environment(RQ_CONFIG="tests.support.fleet_preload")
    command = ["/bin/sh", "-c", f"{worker} & {worker} & {sweeper} & wait"]
    return fleet.stack.enter_context(Proc(command, log=fleet.home / "host.log", env=environ, cwd=fleet.cwd))


def move_elsewhere(fleet: Fleet, task_id: str) -> None:
    """Let its owner's particulars be another machine's."""
    task = fleet.store.keys.task(task_id)
    owner = json.loads(fleet.redis.hget(task, "owner"))  # type: ignore[arg-type]
    fleet.redis.hset(task, "owner", json.dumps({**owner, "boot": "another", "host": "elsewhere"}))


@pytest.mark.parametrize("where", ["near", "far"])
def test_when_a_whole_host_is_lost_another_one_finishes_its_tasks(lost: Lost, verdicts: list[str], where: str) -> None:
    """C14: at once where its processes can be looked for, else when their leases are over."""
    done: Outcome = getattr(lost, where)
    took_s = claimed_at_s(done)[1] - lost.at
    verdicts.append(f"host lost, seen from {'the same' if where == 'near' else 'another'} host: {took_s:.1f} s")
    assert done.problems() == []
    assert (done.task.attempts, done.task.crashes) == (2, 1)
    assert done.results == AFTER_UNKNOWN
    assert done.ran == {"append": 2}
    assert took_s < LEASE_S + SWEEP_S + 2


def test_the_other_hosts_own_task_does_not_notice(lost: Lost) -> None:
    assert lost.control.problems() == []
    assert (lost.control.task.attempts, lost.control.task.crashes, lost.control.results) == (1, 0, BOTH_REAL)


# -- a burst -----------------------------------------------------------------------------------------------------------


class Deaf:
    """Subscribed to every channel, and never reads: what is published to it stays in the server."""

    def __init__(self, fleet: Fleet) -> None:
        self.redis = fleet.redis
        parts = urlsplit(fleet.url)
        self._socket = socket.socket(socket.AF_UNIX if parts.scheme == "unix" else socket.AF_INET)
        self._socket.connect(unquote(parts.path) if parts.scheme == "unix" else (parts.hostname, parts.port))
        self._socket.sendall(b"CLIENT SETNAME deaf\r\nPSUBSCRIBE *\r\n")
        fleet.stack.callback(self._socket.close)
        wait_until(lambda: self._seen("psub") == 1, "the subscription")

    def _seen(self, what: str) -> int | None:
        clients: list[dict[str, str]] = self.redis.client_list()
        return next((int(one[what]) for one in clients if one["name"] == "deaf"), None)

    @property
    def waiting_bytes(self) -> int | None:
        """What the server keeps for it; None once it has been thrown out."""
        return self._seen("omem")


@dataclass
class Burst:
    """`taken_back`: by the status that each task had when it was cancelled."""

    taken_back: dict[Status, list[Outcome]]
    kept: list[Outcome]
    told: Watched
    waiting_bytes: int | None
    deaf: Deaf


@pytest.fixture(scope="module")
def burst(fleet: Fleet, lost: Lost) -> Burst:
    """Tasks are pushed and taken back a moment later: while RQ pops them, just before our claim and just after it."""
    deaf, chance = Deaf(fleet), random.Random(20)
    with monitored(fleet.redis) as told:
        kept = [fleet.enqueue("short") for _ in range(KEPT)]
        outcomes = [fleet.ended(task_id) for task_id in kept]
        by_status: dict[Status, list[str]] = {Status.QUEUED: [], Status.RUNNING: []}
        usual_s = 0.02  # moves to where claims happen on this machine, so that most cancels come close to one
        for _ in range(TAKEN_BACK):
            task_id = fleet.enqueue("short")
            until = time.monotonic() + usual_s * chance.uniform(0.5, 1.5)
            wait_until(lambda until=until: time.monotonic() >= until, "the moment to come", poll_s=0.001)
            try:
                was = fleet.store.cancel(task_id, by="a test")
            except WrongState as too_late:
                was = Status(too_late.status)
            by_status.setdefault(was, []).append(task_id)
            usual_s *= 1.3 if was is Status.QUEUED else 0.7
        taken_back = {status: [fleet.ended(one) for one in tasks] for status, tasks in by_status.items()}
        waiting = deaf.waiting_bytes
    return Burst(taken_back, outcomes, told, waiting, deaf)


def test_a_task_that_was_taken_back_before_its_claim_never_asks_the_model(burst: Burst) -> None:
    """H04. Those that were running when they were taken back are the control: the moment was the right one."""
    queued, running = burst.taken_back[Status.QUEUED], burst.taken_back[Status.RUNNING]
    assert min(len(queued), len(running)) >= TAKEN_BACK / 10
    for done in queued:
        assert done.problems(Status.CANCELLED) == []
        assert (done.requests, done.runs, done.count("claimed"), done.task.attempts) == ([], [], 0, 0)
    for done in running:
        assert done.problems(done.task.status) == []
        assert done.task.status in (Status.CANCELLED, Status.SUCCEEDED)
        assert done.ran["append"] <= 1


def test_what_nobody_took_back_in_the_burst_is_done_once(burst: Burst) -> None:
    for done in burst.kept:
        assert done.problems() == []
        assert (done.task.attempts, done.ran) == (1, {"append": 1})


def test_a_listener_that_never_reads_costs_the_server_no_memory(fleet: Fleet, burst: Burst) -> None:
    """F15: nothing is published, so nothing can pile up; it would be seen if it did."""
    assert burst.waiting_bytes == 0
    assert [words for words in burst.told.commands if words[0] == "PUBLISH"] == []
    fleet.redis.publish("rq:anything", b"x" * 4_000_000)
    assert (burst.deaf.waiting_bytes or 0) > 1_000_000


def test_every_write_to_any_lock_gives_it_a_ttl_or_ends_it(burst: Burst) -> None:
    """D01, D08: of real workers and all their tasks; an overwrite without PX would be for ever."""
    touching = [words for words in burst.told.commands if any(word.strip('"').endswith(":lock") for word in words)]
    writes = [words for words in touching if words[0] not in ("WATCH", "EXISTS", "GET", "MGET")]
    assert {words[0] for words in writes} <= {"SET", "PEXPIRE", "DEL", "PEXPIREAT"}
    taken = [words for words in writes if words[0] == "SET"]
    assert len(taken) >= KEPT
    assert all("PX" in words for words in taken)


def test_rq_is_told_to_let_a_task_run_for_as_long_as_it_takes(fleet: Fleet, burst: Burst) -> None:
    """H08: RQ's default of 180 s once killed long work with nothing to show."""
    assert fleet.job(burst.kept[0].task.task_id).timeout == -1
