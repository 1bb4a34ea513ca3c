"""`enqueue-task` as people and scripts call it. Exit code 0 means accepted, and nothing else does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from itertools import product
from pathlib import Path

import pytest
import redis

from enqueue.cli import NAME, cli
from enqueue.command import run_command
from tests.support.commands import BIN, Commands, Puppet, child, environment
from worker.state.keys import Keys

pytestmark = pytest.mark.server

Here = Callable[..., tuple[int, str, str]]

ID = re.compile(r"[0-9a-z]{26}\n")


@pytest.fixture
def commands(redis_url: str, redis_client: redis.Redis, tmp_path: Path) -> Commands:
    return Commands(redis_url, tmp_path)


@pytest.fixture
def here(redis_url: str, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
         capsys: pytest.CaptureFixture[str]) -> Here:  # fmt: skip
    """`here(*argv)`: the command without a process; (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_REDIS_URL", redis_url)

    def run(*argv: str) -> tuple[int, str, str]:
        code = run_command(cli, NAME, argv)
        return code, *capsys.readouterr()

    return run


def stored(client: redis.Redis, task_id: str, name: str = "text") -> bytes:
    value = client.hget(Keys().task(task_id), name)
    assert isinstance(value, bytes), f"task {task_id} has no {name}"
    return value


def nothing_stored(client: redis.Redis) -> bool:
    return client.dbsize() == 0


def test_the_id_stands_alone_on_stdout_and_one_job_waits(commands: Commands, redis_client: redis.Redis) -> None:
    done = commands.run("enqueue-task", "turn these notes into a report")

    assert ID.fullmatch(done.stdout.decode())
    assert (done.returncode, done.stderr) == (0, b"")
    assert stored(redis_client, done.stdout.decode().strip()) == b"turn these notes into a report"
    assert redis_client.lrange("rq:queue:agents", 0, -1) == [done.stdout.strip() + b"-1"]


@pytest.mark.parametrize(
    ("argv", "text", "queue"),
    [
        (["- [ ] x"], "- [ ] x", "agents"),
        (["--", "--help"], "--help", "agents"),
        (["--", "-f"], "-f", "agents"),
        (["--", "--queue=prod x"], "--queue=prod x", "agents"),
        (["--", "-"], "-", "agents"),
        (["--", "--"], "--", "agents"),
        (["--fix the bug in a=b"], "--fix the bug in a=b", "agents"),
        (["-v is broken"], "-v is broken", "agents"),
        (["--queue=prod", "x"], "x", "prod"),
        (["x", "--queue", "prod"], "x", "prod"),
        (["--system", "- be nice", "x"], "x", "agents"),
        (["--queue", "prod", "--", "--json"], "--json", "prod"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_text_may_begin_with_dashes(
    here: Here, redis_client: redis.Redis, argv: list[str], text: str, queue: str
) -> None:
    """Case I03: a note in Markdown was taken for options."""
    code, out, _ = here(*argv)

    assert code == 0
    assert stored(redis_client, out.strip()) == text.encode()
    assert stored(redis_client, out.strip(), "queue") == queue.encode()


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["-f"], 'enqueue-task -- "…"'),
        (["-fix"], 'enqueue-task -- "…"'),
        (["--que", "x"], "--queue"),
        (["--que=prod", "x"], 'enqueue-task -- "…"'),
        (["--queue"], 'enqueue-task -- "…"'),
        (["--queue", "--wait", "x"], "--queue needs a value"),
        (["--system", "--", "x"], "--system needs a value"),
        (["--wait=yes", "x"], "does not take a value"),
        (["fix", "the", "bug"], "quote it: 'fix the bug'"),
        (["x", "--file", "y"], "more than once"),
        (["x", "-"], "more than once"),
        ([], "… | enqueue-task -"),
        (["--delay", "soon", "x"], "90s, 5m, 2h, 1d"),
        (["--delay=-5", "x"], "90s, 5m, 2h, 1d"),
        (["--max-turns", "0", "x"], "turns_max"),
        (["--max-turns", "many", "x"], "--max-turns"),
        (["--queue=prod x", "y"], "queue name"),
        (["--task-id", "a b", "x"], "task id"),
        (["--file", "missing.txt"], "missing.txt"),
        (["--file", "."], "directory"),
    ],
    ids=" ".join,
)
def test_wrong_use_is_refused_with_a_hint(here: Here, redis_client: redis.Redis, argv: list[str], hint: str) -> None:
    code, out, said = here(*argv)

    assert (code, out) == (2, "")
    assert hint in said
    assert nothing_stored(redis_client)


def test_help_and_version_need_no_redis(tmp_path: Path) -> None:
    nowhere = Commands("redis://127.0.0.1:1", tmp_path)

    shown = nowhere.ok("enqueue-task", "--help")
    assert "Exit codes:" in shown
    assert "--stdin" not in shown
    assert nowhere.ok("enqueue-task", "--version") == f"enqueue-task {version('baton-agents')}\n"


NO_TEXT = [b"", b"  \n", b"caf\xe9", b"\xed\xb3\xbf"]


@pytest.mark.parametrize(
    ("way", "content"),
    [*product(["stdin", "file"], [*NO_TEXT, b"a\0b"]), *product(["argument"], NO_TEXT)],  # no argument holds a NUL
    ids=repr,
)
def test_text_that_is_none_is_refused(
    commands: Commands, redis_client: redis.Redis, tmp_path: Path, way: str, content: bytes
) -> None:
    """Case I06: a blank prompt reached the API, which answered 400."""
    (tmp_path / "text").write_bytes(content)
    argv: dict[str, list[str | bytes]] = {"stdin": ["-"], "file": ["--file", "text"], "argument": [content]}

    commands.refused(2, "enqueue-task", *argv[way], stdin=content if way == "stdin" else b"")
    assert nothing_stored(redis_client)


@pytest.mark.parametrize("way", ["stdin", "file", "file -"])
def test_long_text_arrives_byte_for_byte(
    commands: Commands, redis_client: redis.Redis, tmp_path: Path, way: str
) -> None:
    """Case I04: an argument over 128 KiB cannot even be passed; two megabytes can come by other ways."""
    content = b"\xef\xbb\xbf \r\n" + "zwei € 🙂\r\n".encode() * 140_000 + b"\n\n"
    (tmp_path / "text").write_bytes(content)

    task_id = commands.enqueue(
        *{"stdin": ["-"], "file": ["--file", "text"], "file -": ["--file", "-"]}[way],
        stdin=b"" if way == "file" else content,
    )
    assert stored(redis_client, task_id) == content


def test_too_long_a_text_is_refused_before_it_is_read(commands: Commands, tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(200_000_000)
        file.seek(0)
        with huge.open("rb") as opened:
            said = commands.refused(2, "enqueue-task", "-", stdin=opened.fileno())
    assert "200000000" in said
    assert "10000000" in said
    assert "200000000" in commands.refused(2, "enqueue-task", "--file", "huge")


def test_an_endless_pipe_is_not_read_to_its_end(commands: Commands) -> None:
    argv = [sys.executable, "-c", "while True: print('y' * 1000)"]
    with child(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as endless:
        assert endless.stdout is not None
        said = commands.refused(
            2, "enqueue-task", "-", stdin=endless.stdout.fileno(), env={"BATON_TEXT_MAX_BYTES": "5000"}
        )
    assert "more than 5000 bytes" in said


def test_a_closed_stdin_is_said_to_be_unreadable(redis_url: str, tmp_path: Path) -> None:
    script = f"exec '{BIN / 'enqueue-task'}' - <&-"
    done = subprocess.run(["sh", "-c", script], env=environment(redis_url), capture_output=True, cwd=tmp_path)
    assert done.returncode == 2
    assert b"cannot read standard input" in done.stderr


def test_all_options_reach_the_task(commands: Commands, redis_client: redis.Redis) -> None:
    shown = commands.json(
        "enqueue-task", "x", "--task-id=mine", "--queue=q", "--model=m", "--system=be nice", "--max-turns=3",
        "--max-tokens-total=500", "--tools=read_file, grep", "--tag=one", "--tag", "two", "--delay=2h",
    )  # fmt: skip
    assert shown == {"id": "mine", "existed": False, "status": "parked"}

    task = commands.json("baton", "show", "mine")
    asked = {name: task[name] for name in ("queue", "model", "system", "turns_max", "tokens_max", "tools", "tags")}
    assert asked == {
        "queue": "q", "model": "m", "system": "be nice", "turns_max": 3, "tokens_max": 500,
        "tools": ["read_file", "grep"], "tags": ["one", "two"],
    }  # fmt: skip
    assert task["wake_at_ms"] - task["created_at_ms"] == 7_200_000
    assert redis_client.keys("rq:queue:*") == []


def test_an_empty_list_of_tools_allows_none(commands: Commands) -> None:
    assert commands.json("baton", "show", commands.enqueue("x", "--tools", ""))["tools"] == []


def test_errors_are_json_where_json_was_asked_for(commands: Commands) -> None:
    for argv in (["--json", ""], ["--json", "a", "b"], ["x", "--json", "--nonsense"]):
        done = commands.run("enqueue-task", *argv)
        assert done.returncode == json.loads(done.stdout)["exitCode"] == 2
    assert commands.run("enqueue-task", "", "--", "--json").stdout == b""


def test_text_is_nowhere_in_what_rq_shows(commands: Commands, redis_client: redis.Redis) -> None:
    """Case I07: RQ's description of a job put its arguments, secrets included, into logs and dashboards."""
    from rq.job import Job

    task_id = commands.enqueue("the code is sesame-4711", "--system=sesame-4712", "--tag=sesame-4713")

    job = Job.fetch(f"{task_id}-1", connection=redis_client)
    assert job.args == (task_id, 1)
    seen = [job.description, job.get_call_string(), repr(job.to_dict()), repr(job.meta), repr(job.args)]
    raw = redis_client.hgetall(f"rq:job:{task_id}-1")
    assert isinstance(raw, dict)
    assert "sesame" not in " ".join([*seen, repr(raw)])


def test_a_wrong_setting_is_named(commands: Commands) -> None:
    assert "BATON_TURNS_MAX" in commands.refused(2, "enqueue-task", "x", env={"BATON_TURNS_MAX": "0"})
    secret = {"BATON_REDIS_URL": "redis://:geh#eim/4711@127.0.0.1:1/0"}
    said = commands.refused(2, "enqueue-task", "x", env=secret)
    assert "BATON_REDIS_URL" in said
    assert "eim" not in said


def test_an_unwritable_stdout_does_not_hide_that_the_task_was_accepted(
    commands: Commands, redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    argv = [BIN / "enqueue-task", "--task-id=mine", "x"]
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, env=environment(redis_url), cwd=tmp_path)
    os.close(writer)

    assert done.returncode == 0
    assert done.stderr == b"enqueue-task: task mine was accepted, and nobody reads stdout\n"
    assert stored(redis_client, "mine") == b"x"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_under_stdout_is_said_together_with_the_id(commands: Commands, redis_client: redis.Redis) -> None:
    script = f"'{BIN / 'enqueue-task'}' --task-id=mine x > /dev/full"
    done = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, env=environment(commands.url), cwd=commands.cwd)

    assert done.returncode == 1
    assert done.stderr.decode() == (
        "enqueue-task: task mine was accepted, but stdout cannot be written: No space left on device\n"
    )
    assert stored(redis_client, "mine") == b"x"


def test_the_answer_comes_instead_of_the_id_when_one_waits_for_it(
    commands: Commands, redis_client: redis.Redis
) -> None:
    commands.enqueue("x", "--task-id=mine")
    Puppet(redis_client, "mine").claim().finish(result="line\x1b[31m\nend")

    done = commands.run("enqueue-task", "x", "--task-id=mine", "--wait")
    assert done.returncode == 0
    assert done.stdout == b"line\x1b[31m\nend\n", "into a pipe the answer goes as it is"
    shown = commands.json("enqueue-task", "x", "--task-id=mine", "--wait")
    assert (shown["status"], shown["result"], shown["exitCode"]) == ("succeeded", "line\x1b[31m\nend", 0)
