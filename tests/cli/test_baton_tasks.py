"""`baton tasks`, `show`, `cancel`, `retry`: seen through the commands themselves."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest
import redis

from tests.support.commands import BIN, Commands, Puppet, child, environment
from worker.state.keys import Keys
from worker.state.task import Status

pytestmark = pytest.mark.server

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]x[/red]\u202e"


@pytest.fixture
def commands(redis_url: str, redis_client: redis.Redis, tmp_path: Path) -> Commands:
    return Commands(redis_url, tmp_path)


def of_every_status(commands: Commands, client: redis.Redis) -> None:
    """One task of each status, named by it."""
    for status in Status:
        commands.enqueue("x", f"--task-id={status}")
        if status in (Status.QUEUED, Status.CANCELLED):
            continue
        puppet = Puppet(client, status.value).claim()
        if status is Status.PARKED:
            puppet.store.park(puppet.held, "needs a person: no key", wait_ms=None)
        elif status is not Status.RUNNING:
            puppet.finish(status, reason="because")
    commands.ok("baton", "cancel", "cancelled")


def on_a_terminal(commands: Commands, *argv: str) -> str:
    """What a person sees."""
    ours, theirs = pty.openpty()
    environ = environment(commands.url, TERM="xterm", COLUMNS="120")
    with child([BIN / argv[0], *argv[1:]], stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # how Linux says that the other end is closed
            pass
        assert process.wait(10) == 0
    os.close(ours)
    return shown.decode()


def ids(table: str) -> list[str]:
    return [line.split()[0] for line in table.splitlines()[1:]]


def test_tasks_are_listed_newest_first_and_by_status(commands: Commands, redis_client: redis.Redis) -> None:
    assert commands.run("baton", "tasks").stderr == b"no tasks\n"
    of_every_status(commands, redis_client)

    listed = commands.json("baton", "tasks")
    assert {row["task_id"]: row["status"] for row in listed} == {status.value: status.value for status in Status}
    created = [row["created_at_ms"] for row in listed]
    assert created == sorted(created, reverse=True)
    assert next(row["score_ms"] for row in listed if row["status"] == "parked") is None
    assert ids(commands.ok("baton", "tasks", "--status", "dead")) == ["dead"]
    assert sorted(ids(commands.ok("baton", "tasks", "--status=queued", "--status=failed"))) == ["failed", "queued"]
    assert len(ids(commands.ok("baton", "tasks", "--limit=2"))) == 2
    assert "--status" in commands.refused(2, "baton", "tasks", "--status", "lost")


def test_hostile_text_takes_no_terminal_over(commands: Commands, redis_client: redis.Redis) -> None:
    commands.enqueue(f"one\ntwo {HOSTILE}", "--task-id=mine", "--tag=x")
    puppet = Puppet(redis_client, "mine").claim()
    puppet.finish(Status.FAILED, reason=HOSTILE, result=HOSTILE)

    for argv in (["tasks"], ["show", "mine"]):
        for shown in (on_a_terminal(commands, "baton", *argv), commands.ok("baton", *argv)):
            assert "[red]x[/red]" in shown
            assert "\x1b]0;owned" not in shown
            assert "\x1b[2J" not in shown
            assert "\u202e" not in shown
        as_json = commands.ok("baton", *argv, "--json")
        assert as_json.isascii()
        assert as_json.replace("\n", "").isprintable()
    assert commands.json("baton", "show", "mine")["result"] == HOSTILE


def test_a_terminal_gets_one_line_a_task(commands: Commands) -> None:
    commands.enqueue("long " * 200, "--task-id=mine")

    heading, rule, line = on_a_terminal(commands, "baton", "tasks").splitlines()
    assert "TEXT" in heading
    assert set(rule) == {"─"}
    assert line.split()[:2] == ["mine", "queued"]
    assert len(line) == 120
    assert line.endswith("…")


def test_show_tells_where_a_task_stands(commands: Commands, redis_client: redis.Redis) -> None:
    commands.enqueue("write the report", "--task-id=mine", "--max-turns=5", "--tools=send_email", "--tag=may")
    puppet = Puppet(redis_client, "mine").claim()
    puppet.respond(calls={"t1": "send_email", "t2": "read_file"})

    shown = dict(line.split("  ", 1) for line in commands.ok("baton", "show", "mine").splitlines() if "  " in line)
    fields = {name: value.strip() for name, value in shown.items()}
    assert fields["status"] == "running"
    assert fields["runs on"] == "testhost, process 4711"
    assert fields["turns"] == "1 of 5"
    assert fields["tokens"] == "100 of no limit"
    assert fields["pending"] == "send_email, read_file"
    assert fields["tools"] == "send_email"

    document = commands.json("baton", "show", "mine")
    assert document["progress"]["pendingToolUse"] == [
        {"id": "t1", "name": "send_email"},
        {"id": "t2", "name": "read_file"},
    ]
    puppet.store.park(puppet.held, "needs a person: no key", wait_ms=600_000)
    assert "in 10 min" in commands.ok("baton", "show", "mine")


def test_a_long_text_is_cut_for_people_only(commands: Commands) -> None:
    commands.enqueue("-", stdin=b"x" * 5_000)
    (task_id,) = ids(commands.ok("baton", "tasks"))

    assert "… 3000 more characters" in commands.ok("baton", "show", task_id)
    assert commands.json("baton", "show", task_id)["text"] == "x" * 5_000


def test_damage_is_said_in_words(commands: Commands, redis_client: redis.Redis) -> None:
    commands.enqueue("x", "--task-id=mine")
    redis_client.hset(Keys().task("mine"), "attempts", "many")
    assert "not readable" in commands.refused(1, "baton", "show", "mine")
    redis_client.hset(Keys().task("mine"), mapping={"attempts": "0", "status": "lost"})
    assert "lost" in commands.ok("baton", "tasks"), "one damaged task does not hide the others"
    for argv in (["show", "mine"], ["cancel", "mine"], ["retry", "mine"]):
        assert "not readable" in commands.refused(1, "baton", *argv)
    assert "not readable" in commands.run("baton", "follow", "mine").stderr.decode()
    redis_client.delete(Keys().task("mine"))
    redis_client.set(Keys().task("mine"), "no hash")
    assert "WRONGTYPE" in commands.refused(3, "baton", "show", "mine")


def test_a_beginning_of_an_id_is_enough_if_it_is_one_tasks(commands: Commands) -> None:
    for task_id in ("abc-1", "abc-2", "abd", "ab"):
        commands.enqueue("x", f"--task-id={task_id}")

    assert commands.json("baton", "show", "abd")["task_id"] == "abd"
    assert commands.json("baton", "show", "abc-1")["task_id"] == "abc-1"
    assert commands.json("baton", "show", "ab")["task_id"] == "ab", "a whole id is itself, whatever else begins so"
    assert "several" in commands.refused(2, "baton", "show", "abc")
    assert "no task zzz" in commands.refused(4, "baton", "show", "zzz")
    for wrong in ("", "a*", "a b"):
        assert "no task id" in commands.refused(2, "baton", "show", wrong)


def test_cancel_ends_what_nobody_runs_and_asks_who_runs_it(commands: Commands, redis_client: redis.Redis) -> None:
    of_every_status(commands, redis_client)

    assert "cancelled; it was queued" in commands.ok("baton", "cancel", "queued", "--by", "ann")
    assert commands.json("baton", "show", "queued")["reason"] == "ann"
    assert redis_client.exists("rq:job:queued-1") == 0
    assert "cancelled; it was parked" in commands.ok("baton", "cancel", "parked")
    assert "asked to stop" in commands.ok("baton", "cancel", "running")
    assert redis_client.hexists(Keys().control("running"), "cancel")
    assert "before" in commands.ok("baton", "cancel", "cancelled")
    for ended in ("succeeded", "failed", "dead"):
        assert f"is {ended}" in commands.refused(4, "baton", "cancel", ended)


def test_retry_queues_what_ended_badly_and_wakes_what_is_parked(commands: Commands, redis_client: redis.Redis) -> None:
    of_every_status(commands, redis_client)
    redis_client.delete("rq:queue:agents")

    assert "queued again (delivery 2)" in commands.ok("baton", "retry", "failed", "--max-turns=90")
    assert commands.json("baton", "show", "failed")["turns_max"] == 90
    commands.ok("baton", "retry", "dead")
    assert "woken" in commands.ok("baton", "retry", "parked")
    assert redis_client.lrange("rq:queue:agents", 0, -1) == [b"failed-2", b"dead-2", b"parked-2"]
    for wrong in ("queued", "running", "succeeded"):
        assert f"is {wrong}" in commands.refused(4, "baton", "retry", wrong)
    assert commands.refused(2, "baton", "retry", "cancelled", "--max-turns=0")


def test_a_parked_task_keeps_its_limits(commands: Commands) -> None:
    commands.enqueue("x", "--task-id=mine", "--delay=1h")
    assert "parked" in commands.refused(2, "baton", "retry", "mine", "--max-turns=90")
    assert commands.json("baton", "show", "mine")["status"] == "parked"


def test_a_call_that_holds_a_task_is_resolved_by_a_person(commands: Commands, redis_client: redis.Redis) -> None:
    commands.enqueue("x", "--task-id=mine")
    assert "0 pending calls" in commands.refused(2, "baton", "resolve", "mine", "--report")
    puppet = Puppet(redis_client, "mine").claim()
    puppet.respond(calls={"toolu_1": "wire", "toolu_2": "wire"})
    assert "cannot be resolved" in commands.refused(4, "baton", "resolve", "mine", "toolu_1", "--report"), "it runs"
    puppet.store.park(puppet.held, "needs a person: nobody knows", wait_ms=None)

    assert "say one of" in commands.refused(2, "baton", "resolve", "mine", "toolu_1")
    assert "say one of" in commands.refused(2, "baton", "resolve", "mine", "toolu_1", "--report", "--not-happened")
    assert "not blank" in commands.refused(2, "baton", "resolve", "mine", "toolu_1", "--happened", " ")
    assert "2 pending calls" in commands.refused(2, "baton", "resolve", "mine", "--report")
    assert "queued again" in commands.ok("baton", "resolve", "mine", "toolu_1", "--happened", "wired, no. 17")
    assert (
        redis_client.hget(Keys().control("mine"), "resolve:1:toolu_1")
        == b'{"outcome":"happened","text":"wired, no. 17"}'
    )
    assert commands.json("baton", "show", "mine")["status"] == "queued"
