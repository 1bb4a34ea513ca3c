"""`baton status`, `sweep`, `crash-points`, and what all of `baton` has in common."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click
import pytest
import redis

from ops.cli import COMMANDS, LazyGroup, cli
from ops.tables import print_table
from tests.support.commands import BIN, Commands, Puppet, environment
from tests.support.processes import Proc
from worker.crashpoints import POINTS
from worker.process import this_process
from worker.state.keys import Keys
from worker.state.lease import Holder
from worker.state.task import Status

GONE = {**this_process(), "startedAtTicks": 1}


@pytest.fixture
def commands(redis_url: str, redis_client: redis.Redis, tmp_path: Path) -> Commands:
    return Commands(redis_url, tmp_path)


def held_by_a_dead_process(client: redis.Redis, task_id: str) -> None:
    puppet = Puppet(client, task_id)
    assert isinstance(puppet.store.claim(task_id, 1, GONE), Holder)


@pytest.mark.server
def test_status_counts_and_fails_while_a_task_is_dead(commands: Commands, redis_client: redis.Redis) -> None:
    """Case J09: everything looked healthy, and nothing was done any more."""
    commands.enqueue("x", "--task-id=waits")
    commands.enqueue("x", "--task-id=runs")
    Puppet(redis_client, "runs").claim()
    shown = commands.json("baton", "status")
    assert (shown["counts"]["queued"], shown["counts"]["running"], shown["dead"]) == (1, 1, [])
    assert shown["oldestQueuedS"] >= 0
    assert [(task["id"], task["locked"], task["owner"]["host"]) for task in shown["running"]] == [
        ("runs", True, "testhost")
    ]

    commands.enqueue("x", "--task-id=lost")
    Puppet(redis_client, "lost").claim().finish(Status.DEAD, reason="crashed")
    done = commands.run("baton", "status")
    assert done.returncode == 1
    lines = done.stdout.decode().splitlines()
    assert "dead: lost" in lines
    assert [line.split() for line in lines if line.startswith("dead ")] == [["dead", "1"]]
    assert any(line.startswith("runs") and "testhost" in line and "left" in line for line in lines)
    assert any(line.startswith("oldest queued") for line in lines)

    commands.ok("baton", "retry", "lost")
    assert commands.run("baton", "status").returncode == 0


@pytest.mark.server
def test_status_names_the_dead_behind_many_others(commands: Commands, redis_client: redis.Redis) -> None:
    keys = Keys()
    with redis_client.pipeline() as pipe:
        for number in range(2_500):
            task_id, status = f"t{number}", "dead" if number < 25 else "succeeded"
            pipe.hset(keys.task(task_id), "status", status)
            pipe.zadd(keys.index("finished"), {task_id: number})
        pipe.zadd(keys.index("finished"), {"expired": 3_000})
        pipe.execute()

    done = commands.run("baton", "status")
    assert done.returncode == 1
    counts = dict(line.split() for line in done.stdout.decode().splitlines()[: len(Status)])
    assert (counts["dead"], counts["succeeded"]) == ("25", "2475")
    assert "… and 5 more" in done.stdout.decode()


@pytest.mark.server
def test_one_sweep_says_what_it_did(commands: Commands, redis_client: redis.Redis) -> None:
    assert commands.ok("baton", "sweep", "--once") == "nothing to do\n"
    commands.enqueue("x", "--task-id=mine")
    held_by_a_dead_process(redis_client, "mine")

    said = commands.ok("baton", "sweep", "--once")
    assert said == f"recovered mine: queued, its process {os.getpid()} on {GONE['host']} is gone\n"
    assert redis_client.lrange("rq:queue:agents", 0, 0) == [b"mine-2"]
    assert commands.json("baton", "sweep", "--once")["recovered"] == {}


@pytest.mark.server
def test_one_sweep_in_json(commands: Commands, redis_client: redis.Redis) -> None:
    commands.enqueue("x", "--task-id=mine")
    held_by_a_dead_process(redis_client, "mine")

    report = commands.json("baton", "sweep", "--once")
    assert report["recovered"]["mine"]["status"] == "queued"
    assert report["problems"] == {}


@pytest.mark.server
def test_the_sweeper_goes_on_until_it_is_told_to_stop(
    commands: Commands, redis_client: redis.Redis, start_process: Callable[..., Proc]
) -> None:
    environ = environment(commands.url, BATON_SWEEP_PERIOD_S="0.05")
    sweeper = start_process([BIN / "baton", "sweep"], env=environ, cwd=commands.cwd, name="sweep")
    sweeper.expect("sweeping")
    commands.enqueue("x", "--task-id=mine")
    held_by_a_dead_process(redis_client, "mine")
    sweeper.expect("recovered mine: queued")

    assert sweeper.terminate() == 0
    assert "INFO sweeper-stopped" in sweeper.output()


def test_json_is_for_one_sweep_only(tmp_path: Path) -> None:
    assert "--once" in Commands("redis://127.0.0.1:1", tmp_path).run("baton", "sweep", "--json").stdout.decode()


def test_crash_points_are_listed_with_what_they_mean(tmp_path: Path) -> None:
    shown = Commands("redis://127.0.0.1:1", tmp_path).ok("baton", "crash-points")

    assert [line.split(None, 1) for line in shown.splitlines()] == [list(point) for point in POINTS.items()]


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "ops", "version"], capture_output=True, cwd=tmp_path, timeout=60)
    assert done.stdout.decode() == f"baton {version('baton-agents')}\n"
    assert Commands("redis://127.0.0.1:1", tmp_path).ok("baton", "--version").split()[-1] == version("baton-agents")


def test_help_names_every_command_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    nowhere = Commands("redis://127.0.0.1:1", tmp_path)
    shown = nowhere.ok("baton", "--help")

    assert all(f"  {name} " in shown for name in COMMANDS)
    assert nowhere.ok("baton") == shown
    assert "No such command" in nowhere.refused(2, "baton", "taks")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_imported_and_has_a_help(name: str) -> None:
    assert isinstance(cli, LazyGroup)
    command = cli.get_command(click.Context(cli), name)

    assert command is not None
    assert command.name == name
    assert command.help


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    script = f"'{BIN / 'baton'}' crash-points 2>&1; echo code $? >&2"
    with subprocess.Popen(
        ["sh", "-c", f"({script}) | true"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=tmp_path
    ) as shell:
        _, said = shell.communicate(timeout=60)
    assert said == b"code 0\n"


def test_a_table_without_rows_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["A", "B"], [], empty="none")
    assert capsys.readouterr() == ("", "none\n")
    print_table(["A", "B"], [["x", "[b]\x1b[1mbold"], ["longer", 7]], empty="none")
    assert capsys.readouterr().out == "A       B\nx       [b]bold\nlonger  7\n"
