"""The embedded server: one per directory, shared, and nothing acknowledged is lost by a kill."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

from ops.processes import answers, client, free_port, lock_is_free
from ops.valkey import AlreadyServed, Server, ensure, serve
from ops.valkey_place import Place, place_of
from tests.support.keys import assert_no_leaks, leftover_keys
from tests.support.processes import Proc, alive
from tests.support.waiting import wait_until
from worker.errors import RedisUnavailable

pytestmark = pytest.mark.server

SERVE = [sys.executable, "-P", "-m", "ops.valkey", "serve"]
WAIT = [sys.executable, "-P", "-m", "ops.valkey", "wait"]


def test_what_was_acknowledged_outlives_a_kill_of_the_server(new_server: Callable[..., Server]) -> None:
    first = new_server()
    with client(first.url) as before:
        for number in range(50):
            before.rpush("queue", number)
    first.kill()
    assert not answers(first.url, timeout=0.2)

    second = new_server()
    with client(second.url) as after:
        assert after.llen("queue") == 50
    assert second.url == first.url
    assert second.pid != first.pid


def test_a_clean_stop_keeps_the_data_and_frees_the_directory(new_server: Callable[..., Server]) -> None:
    first = new_server()
    with client(first.url) as before:
        before.set("kept", 1)
    first.stop()
    assert lock_is_free(first.directory / "server.lock")
    assert not alive(first.pid)
    with client(new_server().url) as after:
        assert after.get("kept") == b"1"


def test_a_running_server_is_shared_and_only_its_starter_stops_it(new_server: Callable[..., Server]) -> None:
    first = new_server()
    with ensure(first.directory) as second:
        assert (second.url, second.pid) == (first.url, first.pid)
        assert first.started_here
        assert not second.started_here
    assert answers(first.url)


def test_six_processes_that_start_at_once_end_up_with_one_server(short_dir: Path, server_binary: Path) -> None:
    """Two servers on one append-only directory would both start and interleave their writes."""
    code = "import sys; from ops.valkey import ensure; s = ensure(sys.argv[1], wait_s=30); print(s.pid, s.started_here)"
    racers = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(short_dir / "raced")], stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    lines = [racer.communicate(timeout=60)[0].split() for racer in racers]
    try:
        assert len({pid for pid, _ in lines}) == 1
        assert [started for _, started in lines].count("True") == 1
    finally:
        ensure(short_dir / "raced").stop()


def test_the_loser_of_a_race_says_so_and_ends_with_75(new_server: Callable[..., Server]) -> None:
    running = new_server()
    done = subprocess.run([*SERVE, str(running.directory), "--port", "0"], capture_output=True, text=True, timeout=30)
    assert done.returncode == AlreadyServed.exit_code == 75
    assert "one directory, one server" in done.stderr
    assert "Traceback" not in done.stderr
    assert answers(running.url)


def test_a_standby_takes_over_when_the_server_dies(
    new_server: Callable[..., Server], start_process: Callable[..., Proc]
) -> None:
    first = new_server()
    standby = start_process([*SERVE, first.directory, "--unix", first.directory / "valkey.sock", "--standby"])
    with client(first.url) as before:
        before.set("kept", 1)
    standby.assert_running()
    first.kill()
    wait_until(lambda: answers(first.url), "the standby's answer")
    with client(first.url) as after:
        assert after.info("server")["process_id"] == standby.pid
        assert after.get("kept") == b"1"


def test_a_free_port_is_recorded_read_back_and_kept_over_a_crash(new_server: Callable[..., Server]) -> None:
    first = new_server(port=0)
    record = json.loads((first.directory / "server.json").read_text())
    assert record == {"url": first.url, "pid": first.pid}
    assert first.url.startswith("redis://127.0.0.1:")
    assert ensure(first.directory).url == first.url
    first.kill()
    assert new_server(port=0).url == first.url


def test_a_foreign_server_on_the_recorded_port_is_not_taken_for_ours(
    new_server: Callable[..., Server], short_dir: Path
) -> None:
    """server.json outlives its server; the port may belong to anybody by then."""
    foreign = new_server("foreign", port=0)
    (short_dir / "ours").mkdir()
    (short_dir / "ours" / "server.json").write_text(json.dumps({"url": foreign.url, "pid": 1}))
    ours = new_server("ours", port=0)
    assert ours.pid != foreign.pid
    assert ours.url != foreign.url


def test_it_persists_every_write_evicts_nothing_and_listens_on_loopback_only(
    new_server: Callable[..., Server],
) -> None:
    server = new_server(port=0)
    with client(server.url) as asking:
        found = {
            key: value
            for name in ("append*", "save", "maxmemory-policy", "bind", "protected-mode")
            for key, value in asking.config_get(name).items()
        }
    wanted = {
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",
        "bind": "127.0.0.1",
        "protected-mode": "yes",
    }
    assert found | wanted == found


def test_the_unix_socket_is_private(new_server: Callable[..., Server]) -> None:
    server = new_server()
    assert server.url.startswith("unix://")
    assert (server.directory / "valkey.sock").stat().st_mode & 0o077 == 0
    assert server.directory.stat().st_mode & 0o077 == 0


def test_extra_arguments_win(new_server: Callable[..., Server]) -> None:
    with client(new_server(extra=("--appendfsync", "no")).url) as asking:
        assert asking.config_get("appendfsync") == {"appendfsync": "no"}


def test_a_socket_path_that_is_too_long_is_refused_in_words(short_dir: Path) -> None:
    """Valkey itself would start, log a line, and listen nowhere."""
    long = short_dir / ("x" * 108)
    with pytest.raises(RedisUnavailable, match="may have 107 bytes"):
        serve(short_dir / "d", unix_socket=long)
    with pytest.raises(RedisUnavailable, match="may have 107 bytes"):
        ensure(short_dir / "d", unix_socket=long)


def test_a_directory_too_deep_for_a_socket_gets_a_port(new_server: Callable[..., Server]) -> None:
    assert new_server("y" * 120).url.startswith("redis://127.0.0.1:")


def test_a_server_that_cannot_start_shows_the_end_of_its_log(short_dir: Path, server_binary: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RedisUnavailable, match="in use") as caught:
        ensure(short_dir / "d", port=taken.getsockname()[1])
    assert caught.value.exit_code == 3
    assert lock_is_free(short_dir / "d" / "server.lock")


def test_a_password_is_required_and_seen_neither_in_ps_nor_in_a_file(
    short_dir: Path, server_binary: Path, start_process: Callable[..., Proc]
) -> None:
    secret = 'pa"ss\\word-4711'
    port = free_port()
    env = os.environ | {"RQ_REDIS_URL": f"redis://:{quote(secret)}@127.0.0.1:{port}/0"}
    serving = start_process([*SERVE, short_dir / "d", "--from-env"], env=env)
    serving.expect("Ready to accept connections")
    with client(env["RQ_REDIS_URL"]) as allowed:
        assert allowed.ping()
    assert not answers(f"redis://127.0.0.1:{port}")
    shown = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(serving.pid)], capture_output=True, text=True)
    assert "valkey-server" in shown.stdout
    assert "4711" not in shown.stdout
    written = [path for path in short_dir.rglob("*") if path.is_file() and b"4711" in path.read_bytes()]
    assert written == []


def test_wait_becomes_the_command_once_the_server_answers(
    short_dir: Path, server_binary: Path, start_process: Callable[..., Proc]
) -> None:
    port = free_port()
    env = os.environ | {"RQ_REDIS_URL": f"redis://127.0.0.1:{port}/0"}
    waiting = start_process([*WAIT, "echo", "the server", "--is", "there"], env=env, name="waiting")
    start_process([*SERVE, short_dir / "d", "--port", str(port)], name="serving")
    assert waiting.wait() == 0
    assert waiting.output() == "the server --is there\n"


def test_wait_and_ping_give_up_with_a_sentence_and_without_the_password() -> None:
    url = f"redis://:sesame@127.0.0.1:{free_port()}/0"
    for command in (["ping"], ["wait", "--wait-s", "0.1", "true"]):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ops.valkey", *command],
            env=os.environ | {"RQ_REDIS_URL": url},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == RedisUnavailable.exit_code
        assert done.stderr.startswith("baton: no answer from redis://***@127.0.0.1")
        assert "sesame" not in done.stderr


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://", Place(port=6379)),
        ("redis://localhost:7000/3", Place(port=7000)),
        ("redis://:p%40ss@127.0.0.1:7000", Place(port=7000, password="p@ss")),
        ("unix:///run/a%20b.sock?db=1", Place(unix_socket=Path("/run/a b.sock"))),
    ],
)
def test_an_embedded_server_can_be_put_where_a_local_url_says(url: str, place: Place) -> None:
    assert place_of(url) == place


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://redis.example:6379/0", "only at redis://127.0.0.1"),
        ("rediss://:pw@127.0.0.1:6379/0", "only at redis://127.0.0.1"),
        ("redis://[::1]:6379", "only at redis://127.0.0.1"),
        ("redis://alice:pw@127.0.0.1:6379/0", "would not know a user 'alice'"),
        ("redis://127.0.0.1:99999", "out of range"),
    ],
)
def test_elsewhere_is_refused_in_words_without_the_password(url: str, why: str) -> None:
    with pytest.raises(RedisUnavailable, match=why) as caught:
        place_of(url)
    assert "pw" not in str(caught.value)


def test_a_url_nobody_understands_does_not_answer() -> None:
    assert not answers("http://127.0.0.1:6379")


def test_a_key_that_stays_for_ever_is_a_leak_unless_it_is_allowed(redis_client: redis.Redis) -> None:
    redis_client.set("ends", 1, px=60_000)
    redis_client.set("stays", 1)
    left = leftover_keys(redis_client)
    assert left["stays"] == -1
    assert 0 < left["ends"] <= 60_000
    assert_no_leaks(redis_client, allowed=lambda key: key == "stays")
    with pytest.raises(AssertionError, match=r"\['stays'\]"):
        assert_no_leaks(redis_client)
