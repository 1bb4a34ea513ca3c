"""`baton workers`: list, quiet, resume, drain."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import SimpleWorker
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE

from enqueue.command import run_command
from ops.cli import cli
from tests.support.fleet import Fleet, running_fleet
from tests.support.fleet_workers import listening
from worker.dispatch import WORKER_CLASS_FIELD, job_id
from worker.state.keys import Keys

pytestmark = pytest.mark.server

QUIET = Keys().quiet()
Baton = Callable[..., tuple[int, str, str]]


class Ours(SimpleWorker):
    """To whoever reads what RQ has of it, one of ours."""

    def serialize(self) -> dict[str, Any]:
        return {**super().serialize(), WORKER_CLASS_FIELD: "ForkWorker"}


@pytest.fixture
def baton(redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Baton:
    """`baton` in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("BATON_REDIS_URL", redis_url)
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        code = run_command(cli, "baton", args)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def registered(redis_client: redis.Redis) -> Iterator[None]:
    """Two of ours, a stock one, and one that was killed: RQ still lists it, and nobody hears for it."""
    with ExitStack() as stack:
        for name, kind in {"aa1": Ours, "aa2": Ours, "bb1": SimpleWorker, "dead": Ours}.items():
            kind(["agents"], name=name, connection=redis_client).register_birth()
            if name != "dead":
                hears = stack.enter_context(closing(redis_client.pubsub()))
                hears.subscribe(f"rq:pubsub:{name}")
                hears.get_message(timeout=5)
        redis_client.sadd(WORKER_EXECUTIONS_KEY_TEMPLATE.format("aa1"), f"{job_id('t1', 3)}:e1")
        redis_client.hset("rq:worker:aa1", "state", "busy")
        redis_client.hset("rq:worker:bb1", mapping={"state": "busy", "shutdown_requested_date": "now"})
        yield


def test_workers_are_listed_with_what_they_run_and_marks_of_dead_ones_go(
    baton: Baton, registered: None, redis_client: redis.Redis
) -> None:
    redis_client.sadd(QUIET, "aa2", "long-gone")
    code, out, _ = baton("workers", "--json")
    assert code == 0
    found = {worker["name"]: worker for worker in json.loads(out)}
    assert {name: (one["class"], one["state"]) for name, one in found.items()} == {
        "aa1": ("ForkWorker", "busy"),
        "aa2": ("ForkWorker", "quiet"),
        "bb1": ("stock", "draining"),
        "dead": ("ForkWorker", "lost"),
    }
    assert (found["aa1"]["tasks"], found["aa2"]["tasks"], found["aa1"]["queues"]) == (["t1"], [], ["agents"])
    assert found["aa1"]["pid"]
    assert redis_client.smembers(QUIET) == {b"aa2"}
    _, table, _ = baton("workers")
    line = next(line.split() for line in table.splitlines() if line.startswith("aa1"))
    assert (line[1], line[4], line[-1]) == ("ForkWorker", "busy", "t1")


def test_quiet_and_resume_name_workers_by_beginnings(baton: Baton, registered: None, redis_client: redis.Redis) -> None:
    assert baton("workers", "quiet", "aa1")[:2] == (0, "aa1: quiet; it runs t1\n")
    assert redis_client.smembers(QUIET) == {b"aa1"}
    code, _, said = baton("workers", "quiet", "aa")
    assert (code, "begins the names of several workers: aa1, aa2" in said) == (2, True)
    code, _, said = baton("workers", "quiet", "nobody")
    assert (code, "there is no worker nobody" in said) == (4, True)
    assert baton("workers", "quiet")[0] == baton("workers", "quiet", "aa1", "--all")[0] == 2
    assert baton("workers", "resume", "--all")[0] == 0
    assert not redis_client.exists(QUIET)


def test_a_stock_worker_cannot_be_quiet_and_the_answer_says_what_can_be_done(
    baton: Baton, registered: None, redis_client: redis.Redis
) -> None:
    code, out, said = baton("workers", "quiet", "bb")
    assert (code, out) == (2, "")
    assert "bb1 is a stock RQ worker" in said
    assert "rq suspend" in said
    assert "baton workers drain bb1" in said
    code, out, said = baton("workers", "quiet", "--all")
    assert (code, "bb1 is a stock RQ worker" in said) == (0, True)
    assert redis_client.smembers(QUIET) == {b"aa1", b"aa2", b"dead"}


def test_a_dead_worker_is_not_waited_for(baton: Baton, registered: None) -> None:
    code, out, said = baton("workers", "drain", "dead", "--wait")
    assert (code, out, "nobody hears it" in said) == (0, "", True)


@pytest.mark.fleet
def test_drain_waits_until_a_real_worker_is_gone(
    baton: Baton, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running_fleet(tmp_path_factory.mktemp("drained"), redis_url) as fleet:
        _drains(baton, fleet)


def _drains(baton: Baton, fleet: Fleet) -> None:
    stays, goes = (fleet.worker("idle", preload=False, options=("-n", name)) for name in ("stays", "goes"))
    for one in (stays, goes):
        listening(one)
    code, out, _ = baton("workers", "drain", "goes", "--wait")
    assert code == 0
    assert out.splitlines()[0] == "goes: told to end; it runs nothing"
    assert out.splitlines()[1].startswith("goes: gone after ")
    assert goes.wait(10) == 0
    stays.assert_running()
    assert [worker["name"] for worker in json.loads(baton("workers", "--json")[1])] == ["stays"]
