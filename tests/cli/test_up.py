"""`baton up`: everything runs in one terminal, comes back when it is killed, and goes away when it is told to."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ops import stack
from ops.processes import answers, client, free_port, lock_is_free
from ops.valkey import Server, ensure
from tests.support.processes import Proc, alive
from tests.support.waiting import wait_until
from worker.errors import RedisUnavailable
from worker.settings import load_settings

pytestmark = [pytest.mark.server, pytest.mark.fleet]

SECRET = "sesame-4711"
WORKERS_START_MAX_S = 120  # they import all that a task needs before they listen


@dataclass
class Stack:
    """A `baton up` in a directory of its own, and what can be seen of it from outside."""

    cwd: Path
    start: Callable[..., Proc]
    url: str
    dashboard_port: int

    def up(self, *options: str, **variables: str) -> Proc:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("BATON_", "ANTHROPIC_"))}
        environ |= {"BATON_REDIS_URL": self.url, "BATON_DASHBOARD_PORT": str(self.dashboard_port)}
        argv = [sys.executable, "-P", "-m", "ops.up", *options]
        return self.start(argv, env=environ | variables, cwd=self.cwd, name="up")

    @property
    def home(self) -> Path:
        return self.cwd / ".baton"

    def pid_of(self, program: str) -> int:
        """The pid supervisord gave the program last; 0 before it was ever spawned."""
        log = self.home / "logs" / "supervisor.log"
        text = log.read_text() if log.exists() else ""
        found = re.findall(rf"spawned: '{program}' with pid (\d+)", text)
        return int(found[-1]) if found else 0

    def worker_pids(self) -> set[int]:
        """Pids of the workers that registered themselves with RQ and live."""
        with client(self.url, timeout=5) as asking:
            pids = {int(asking.hget(key, "pid") or 0) for key in asking.scan_iter("rq:worker:*", count=1000)}
        return {pid for pid in pids if pid and alive(pid)}

    def await_workers(self, count: int) -> set[int]:
        return wait_until(
            lambda: pids if len(pids := self.worker_pids()) == count else None,
            f"{count} workers",
            timeout=WORKERS_START_MAX_S,
        )


@pytest.fixture
def local(server_binary: Path, short_dir: Path, start_process: Callable[..., Proc]) -> Stack:
    # A name that an ini file, a shell and a % format would each trip over.
    cwd = short_dir / "a #1 %s ;b"
    cwd.mkdir()
    return Stack(cwd, start_process, f"redis://127.0.0.1:{free_port()}/0", free_port())


def test_everything_comes_up_and_goes_away_and_the_data_stays(local: Stack) -> None:
    up = local.up("--workers", "2")
    up.expect("baton is up")
    local.await_workers(2)
    page = f"http://127.0.0.1:{local.dashboard_port}/"
    up.expect("Running on")
    assert urllib.request.urlopen(page, timeout=10).status == 200
    with client(local.url) as asking:
        asking.set("kept", 1)

    assert up.terminate(60) == 0
    assert up.descendants() == []
    assert not answers(local.url, timeout=0.2)
    with ensure(local.home / "valkey") as again, client(again.url) as asking:
        assert asking.get("kept") == b"1"


def test_the_table_says_what_runs_where(local: Stack) -> None:
    up = local.up("--workers", "1")
    up.expect("stop ")
    shown = up.output()
    for part in (local.url, ".baton/valkey", f"http://127.0.0.1:{local.dashboard_port}", "enqueue-task", "1 x rq"):
        assert part in shown
    assert "ANTHROPIC_API_KEY is not set" in shown
    up.expect("worker-0   | ")


def test_a_killed_worker_is_replaced_and_its_peer_is_left_alone(local: Stack) -> None:
    up = local.up("--no-dashboard")
    up.expect("baton is up")
    victim, peer = sorted(local.await_workers(2))
    os.kill(victim, signal.SIGKILL)
    replaced = wait_until(
        lambda: pids if len(pids := local.worker_pids() - {victim}) == 2 else None,
        "a new worker",
        timeout=WORKERS_START_MAX_S,
    )
    assert peer in replaced
    up.expect("terminated by SIGKILL: starting another")


def test_a_killed_server_comes_back_with_its_data_and_the_workers_work_again(local: Stack) -> None:
    """After a restart of Redis workers either consume again or exit and are started again (case C11)."""
    up = local.up("--workers", "1", "--no-dashboard")
    up.expect("baton is up")
    local.await_workers(1)
    with client(local.url) as asking:
        asking.set("kept", 1)
    first = local.pid_of("valkey")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: local.pid_of("valkey") != first and answers(local.url), "a new server", timeout=30)
    with client(local.url) as asking:
        assert asking.get("kept") == b"1"
    wait_until(lambda: _is_listened_to(local.url, "agents"), "a worker that waits for jobs", timeout=60)


def _is_listened_to(url: str, queue: str) -> bool:
    with client(url, timeout=5) as asking:
        return any(peer["cmd"].lower().startswith(("blmove", "blpop", "brpop")) for peer in asking.client_list())


def test_ctrl_c_stops_it_like_sigterm(local: Stack) -> None:
    up = local.up("--workers", "1", "--no-dashboard")
    up.expect("baton is up")
    up.signal(signal.SIGINT)
    assert up.wait(60) == 0
    assert up.descendants() == []


def test_a_second_one_in_the_same_directory_is_refused(local: Stack) -> None:
    first = local.up("--workers", "1", "--no-dashboard")
    first.expect("baton is up")
    second = local.up("--workers", "1", "--no-dashboard")
    assert second.wait() == 1
    assert f"already runs in .baton (pid {first.pid})" in second.output()
    assert "Traceback" not in second.output()
    first.assert_running()


def test_the_next_one_takes_over_what_a_killed_one_left(local: Stack) -> None:
    first = local.up("--workers", "1", "--no-dashboard")
    first.expect("baton is up")
    old = local.await_workers(1)
    with client(local.url) as asking:
        asking.set("kept", 1)
    first.kill()
    assert answers(local.url), "supervisord and its programs go on"

    second = local.up("--workers", "1", "--no-dashboard")
    second.expect("stopping what it left")
    second.expect("baton is up", timeout=60)
    assert first.descendants() == []
    assert local.await_workers(1).isdisjoint(old)
    with client(local.url) as asking:
        assert asking.get("kept") == b"1"
    assert second.terminate(60) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_a_killed_supervisord_takes_its_programs_with_it(local: Stack) -> None:
    up = local.up("--workers", "1", "--no-dashboard")
    up.expect("baton is up")
    local.await_workers(1)
    os.kill(int((local.home / "supervisord.pid").read_text()), signal.SIGKILL)
    assert up.wait() == 1
    assert "supervisord ended by itself (-9)" in up.output()
    wait_until(lambda: up.descendants() == [], "the end of all programs", timeout=30)
    assert lock_is_free(local.home / "valkey" / "server.lock")


def test_a_server_that_answers_already_is_used_and_outlives_the_stack(
    local: Stack, new_server: Callable[..., Server]
) -> None:
    local.url = new_server(port=0).url
    up = local.up("--workers", "1", "--no-dashboard")
    up.expect("was running already")
    assert local.pid_of("valkey") == 0
    local.await_workers(1)
    assert up.terminate(60) == 0
    assert answers(local.url)


def test_a_unix_socket_is_served_too(local: Stack) -> None:
    local.url = f"unix://{local.cwd.parent / 'v.sock'}"
    up = local.up("--workers", "1")
    up.expect("baton is up")
    local.await_workers(1)
    up.expect("Running on")


def test_a_password_is_shown_neither_in_the_table_nor_in_ps_nor_in_a_file(local: Stack) -> None:
    local.url = local.url.replace("redis://", f"redis://:{SECRET}@")
    up = local.up("--workers", "1", ANTHROPIC_API_KEY=f"key-{SECRET}")
    up.expect("baton is up")
    local.await_workers(1)
    up.expect("Running on")
    assert urllib.request.urlopen(f"http://127.0.0.1:{local.dashboard_port}/0/data/queues.json").status == 200
    assert "redis://***@" in up.output()
    assert SECRET not in up.output()
    for pid in up.descendants():
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    files = [path for path in local.home.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert not answers(local.url.replace(SECRET, "wrong"))


def test_variables_of_a_dotenv_file_reach_the_children(local: Stack) -> None:
    (local.cwd / ".env").write_text(f"ANTHROPIC_API_KEY={SECRET}\nBATON_QUEUE=from-dotenv\n")
    up = local.up("--workers", "1", "--no-dashboard")
    up.expect("baton is up")
    assert "ANTHROPIC_API_KEY" not in up.output()
    local.await_workers(1)
    (worker,) = local.worker_pids()
    assert f"ANTHROPIC_API_KEY={SECRET}".encode() in Path(f"/proc/{worker}/environ").read_bytes()
    assert b"from-dotenv" in Path(f"/proc/{worker}/cmdline").read_bytes()


def test_a_taken_dashboard_port_is_said_and_the_rest_goes_on(local: Stack) -> None:
    with socket.create_server(("127.0.0.1", local.dashboard_port)):
        up = local.up("--workers", "1")
        up.expect("going on without a dashboard")
        up.expect("baton is up")
        local.await_workers(1)
        assert local.pid_of("dashboard") == 0


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://:pw@redis.invalid:6379/0", "can be started only at"),
        ("rediss://:pw@127.0.0.1:1/0", "can be started only at"),
    ],
)
def test_without_a_server_elsewhere_it_ends_with_3_and_a_sentence(local: Stack, url: str, why: str) -> None:
    local.url = url
    up = local.up()
    assert up.wait() == RedisUnavailable.exit_code
    assert why in up.output()
    assert "pw" not in up.output()
    assert "Traceback" not in up.output()


def test_a_port_held_by_something_else_is_said_and_not_tried_for_ever(local: Stack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        local.url = f"redis://127.0.0.1:{other.getsockname()[1]}/0"
        up = local.up()
        assert up.wait() == RedisUnavailable.exit_code
        assert "does not answer PING" in up.output()


def test_data_that_is_served_at_another_url_is_not_served_twice(local: Stack) -> None:
    with ensure(local.home / "valkey") as elsewhere:
        up = local.up()
        assert up.wait() == RedisUnavailable.exit_code
        assert elsewhere.url in up.output().replace("\n", "")


def test_the_settings_at_hand_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drill calls run_stack with settings of its own; its children must work with the same ones."""
    monkeypatch.setenv("BATON_QUEUE", "from-environment")
    given = load_settings({}, queue="given", fetch_private=True, smtp_url="smtp://u:p@h:1")
    environ = stack.environment(given)
    assert load_settings(environ) == given


def test_a_log_is_shown_line_by_line_behind_its_name_also_after_rotation(tmp_path: Path) -> None:
    log, shown = tmp_path / "worker-0.log", list[str]()
    log.write_text("from an earlier run\n")
    tail = stack.LogTail(tmp_path, show=shown.append)
    with log.open("a") as out:
        out.write("one\ntw")
    tail.pump()
    with log.open("a") as out:
        out.write("o\n")
    tail.pump()
    log.write_text("new\n")
    tail.pump()
    assert shown == ["worker-0   | one", "worker-0   | two", "worker-0   | new"]
