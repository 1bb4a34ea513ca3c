"""Following a task: what is shown while it runs, how it ends, and what a Redis that goes away does to it."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from enqueue import TaskHandle, enqueue_task
from enqueue.follow import follow
from ops.valkey import Server
from tests.support.commands import BIN, Commands, Puppet, child, environment, interruptible
from tests.support.processes import Proc
from tests.support.waiting import wait_until
from worker.clock import ManualClock
from worker.errors import RedisUnavailable, TaskNotFound
from worker.settings import load_settings
from worker.state.keys import Keys
from worker.state.task import Status
from worker.state.transact import connect
from worker.state.views import Views

pytestmark = pytest.mark.server

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]x[/red]\u202e"


@pytest.fixture
def handle(redis_url: str, redis_client: redis.Redis) -> TaskHandle:
    return enqueue_task("x", task_id="mine", settings=load_settings({}, redis_url=redis_url), client=redis_client)


@pytest.fixture
def start(redis_url: str, tmp_path: Path, start_process: Callable[..., Proc]) -> Callable[..., Proc]:
    def run(name: str, *argv: str) -> Proc:
        command = interruptible([BIN / name, *argv])
        return start_process(command, env=environment(redis_url), cwd=tmp_path, name=name)

    return run


def play_a_crash(client: redis.Redis) -> None:
    """A side effect happens, is recorded, and its worker dies before the turn is saved; the next one goes on."""
    puppet = Puppet(client, "mine").claim()
    (call,) = puppet.respond(f"I shall write {HOSTILE}", calls={"t1": "write_report"})
    puppet.run_call(call)
    puppet.die()
    puppet.claim().answer({"t1": "reuse"})
    puppet.respond("All done.")
    puppet.finish(result=f"All done. {HOSTILE}")


def test_progress_goes_to_stderr_and_the_answer_to_stdout(
    handle: TaskHandle, redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    argv = [BIN / "enqueue-task", "--task-id=mine", "--follow", "x"]
    pipe, environ = subprocess.PIPE, environment(redis_url)
    with child(argv, stdout=pipe, stderr=pipe, env=environ, cwd=tmp_path) as process:
        assert process.stderr is not None
        seen = [process.stderr.readline() for _ in range(3)]  # it follows before anything happens
        assert seen[2].rstrip().endswith(b"accepted and queued")
        play_a_crash(redis_client)
        out, rest = process.communicate(timeout=30)

    assert process.returncode == 0
    assert out.decode() == f"All done. {HOSTILE}\n", "a pipe gets the answer as it is"
    lines = [line.partition(" ")[2] for line in rest.decode().splitlines()]
    assert lines == [
        "started by attempt 1",
        "turn 1: the model calls write_report (100 tokens)",
        "turn 1: it says: I shall write [red]x[/red]",
        "write_report: started",
        "write_report: done",
        "worker died (its process 4711 on testhost is gone); the task is queued again",
        "resumed by attempt 2 (epoch 3)",
        "write_report: ledger hit, result reused, not run again",
        "turn 1: all results saved",
        "turn 2: the model ended with end_turn (100 tokens)",
        "turn 2: it says: All done.",
        "succeeded",
    ]


@pytest.mark.parametrize("command", [["enqueue-task", "--task-id=mine", "--follow", "x"], ["baton", "follow", "mi"]])
def test_on_a_terminal_hostile_text_stays_text(
    handle: TaskHandle, redis_client: redis.Redis, redis_url: str, tmp_path: Path, command: list[str]
) -> None:
    play_a_crash(redis_client)
    ours, theirs = pty.openpty()
    environ = environment(redis_url, TERM="xterm-256color", COLUMNS="200")
    argv = [BIN / command[0], *command[1:]]
    with child(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, cwd=tmp_path) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # how Linux says that the other end is closed
            pass
        process.wait(10)
    os.close(ours)

    assert process.returncode == 0
    text = shown.decode()
    assert "ledger hit, result reused, not run again" in text
    assert "I shall write [red]x[/red]" in text
    assert text.rstrip().endswith("All done. [red]x[/red]")
    assert "\x1b]0;owned" not in text
    assert "\x1b[2J" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize(
    ("end", "reason", "code", "said"),
    [
        (Status.SUCCEEDED, "end_turn", 0, "succeeded"),
        (Status.FAILED, "limit: 40 turns used", 1, "failed: limit: 40 turns used"),
        (Status.CANCELLED, "ann", 1, "cancelled by ann"),
        (Status.DEAD, "crashed 3 times in a row", 1, "dead: crashed 3 times in a row"),
    ],
)
def test_the_exit_code_says_how_it_ended(
    handle: TaskHandle,
    redis_client: redis.Redis,
    redis_url: str,
    tmp_path: Path,
    end: Status,
    reason: str,
    code: int,
    said: str,
) -> None:
    Puppet(redis_client, "mine").claim().finish(end, reason=reason, result="so far")
    commands = Commands(redis_url, tmp_path)

    waited = commands.run("enqueue-task", "--task-id=mine", "--wait", "x")
    assert (waited.returncode, waited.stdout) == (code, b"so far\n")
    assert (f"task {said}" in waited.stderr.decode()) == (code != 0)
    followed = commands.run("baton", "follow", "mine")
    assert followed.returncode == code
    assert followed.stdout.decode().endswith(f"{said}\n\nso far\n")
    document = json.loads(commands.run("enqueue-task", "--task-id=mine", "--wait", "--json", "x").stdout)
    assert (document["exitCode"], document["status"], document["result"]) == (code, end, "so far")


@pytest.mark.parametrize("argv", [["enqueue-task", "--task-id=mine", "--wait", "x"], ["baton", "follow", "mine"]])
def test_ctrl_c_leaves_the_task_alone_and_says_so(
    handle: TaskHandle, start: Callable[..., Proc], redis_client: redis.Redis, argv: list[str]
) -> None:
    following = start(*argv)
    wait_until(lambda: int(redis_client.info("clients")["blocked_clients"]), "somebody waits for events")  # type: ignore[index]
    following.signal(signal.SIGINT)

    assert following.wait() == 130
    assert "goes on" in following.output()
    assert "Traceback" not in following.output()
    assert handle.status() is Status.QUEUED


def test_ctrl_c_before_the_answer_of_redis_leaves_no_doubt_about_what_to_do(
    tmp_path: Path, start_process: Callable[..., Proc]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environ = environment(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        argv = interruptible([BIN / "enqueue-task", "--task-id=mine", "x"])
        asking = start_process(argv, env=environ, cwd=tmp_path)
        silent.settimeout(20)
        connection, _ = silent.accept()
        with connection:
            asking.signal(signal.SIGINT)
            assert asking.wait() == 130
    assert asking.output() == "enqueue-task: interrupted while enqueuing; to be sure, repeat it with --task-id mine\n"


def test_waiting_has_an_end_and_the_task_has_not(handle: TaskHandle, redis_client: redis.Redis) -> None:
    with pytest.raises(TimeoutError, match="mine"):
        handle.wait(timeout_s=0.05)
    Puppet(redis_client, "mine").claim().finish(result="done")

    assert handle.wait(timeout_s=0).result == "done", "a task that has ended needs no time"
    assert handle.wait().status is Status.SUCCEEDED


def test_an_end_that_was_taken_back_is_no_end(handle: TaskHandle, redis_client: redis.Redis) -> None:
    puppet = Puppet(redis_client, "mine").claim()
    puppet.finish(Status.FAILED, reason="limit")
    puppet.store.retry("mine", by="ann")

    following = handle.events(follow=True, timeout_s=20)
    kinds = [next(following).kind for _ in range(4)]
    puppet.claim().finish()
    kinds += [event.kind for event in following]

    assert kinds == ["created", "claimed", "ended", "retried", "claimed", "ended"]


def test_following_goes_on_after_a_cursor(handle: TaskHandle, redis_client: redis.Redis) -> None:
    first, *_ = handle.events()
    Puppet(redis_client, "mine").claim().finish()

    assert [event.kind for event in handle.events(first.cursor, follow=True)] == ["claimed", "ended"]


def test_a_task_whose_events_are_gone_still_ends(handle: TaskHandle, redis_client: redis.Redis) -> None:
    Puppet(redis_client, "mine").claim().finish()
    redis_client.delete(Keys().events("mine"))

    assert list(handle.events(follow=True)) == []


def test_a_task_that_expires_meanwhile_is_not_found(handle: TaskHandle, redis_client: redis.Redis) -> None:
    redis_client.delete(*Keys().of_task("mine"))

    with pytest.raises(TaskNotFound):
        list(handle.events(follow=True))


def test_a_restart_of_redis_is_waited_for_and_nothing_is_shown_twice(
    new_server: Callable[..., Server], tmp_path: Path, start_process: Callable[..., Proc]
) -> None:
    server = new_server()
    commands = Commands(server.url, tmp_path)
    commands.enqueue("--task-id=mine", "x")
    argv = [BIN / "baton", "follow", "mine"]
    following = start_process(argv, env=environment(server.url), cwd=tmp_path)
    following.expect("accepted and queued")
    with connect(server.url) as client:
        Puppet(client, "mine").claim()
        following.expect("started by attempt 1")
    server.stop()
    following.expect("Redis does not answer")

    with connect(new_server().url) as client:
        task = Views(client, Keys()).task("mine")
        assert task.status is Status.RUNNING
        puppet = Puppet(client, "mine")
        puppet.store.recover("mine", proof="its lease ran out", fence=str(fence_of(client)))
        puppet.claim().finish(result="after all")

    assert following.wait() == 0
    assert following.output().count("accepted and queued") == 1
    assert following.output().count("Redis does not answer") == 1
    assert following.output().endswith("\n\nafter all\n")


def fence_of(client: redis.Redis) -> str:
    raw = client.get(Keys().epoch("mine"))
    assert isinstance(raw, bytes)
    return raw.decode()


def test_patience_with_a_redis_that_stays_away_has_an_end() -> None:
    clock, outages = ManualClock(), []
    with connect("redis://127.0.0.1:1/0") as client:
        views = Views(client, Keys())
        with pytest.raises(RedisUnavailable, match="for 60 s"):
            list(follow(views, "mine", clock=clock, on_away=outages.append))
        with pytest.raises(TimeoutError, match="nobody knows"):
            list(follow(views, "mine", clock=clock, until=clock.monotonic() + 5))

    assert len(outages) == 1
    assert 64 < clock.monotonic() - ManualClock().monotonic() < 68


def test_wrong_credentials_are_not_waited_for(handle: TaskHandle, redis_url: str) -> None:
    with connect(f"{redis_url}?password=wrong&username=nobody") as client, pytest.raises(redis.AuthenticationError):
        list(follow(Views(client, Keys()), "mine", clock=ManualClock()))
