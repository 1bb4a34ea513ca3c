"""The container files: what they promise is read from them, and each service's own command is really run."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from rq import Queue

from ops.processes import answers, client, free_port
from ops.valkey import Server
from tests.support.processes import Proc
from tests.support.waiting import wait_until
from worker.dispatch import ENTRY_POINT
from worker.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "ops" / "Dockerfile").read_text()
BIN = Path(sys.executable).parent
PASSWORD = "sesame-4711"


def pairs(command: list[str]) -> dict[str, str]:
    """`--name value` arguments as a mapping."""
    return {name: value for name, value in pairwise(command) if name.startswith("--")}


def environment(service: str, url: str) -> dict[str, str]:
    """The service's variables as compose would fill them in, with the server at hand for `valkey`."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("BATON_", "RQ_"))}
    for key, value in SERVICES[service]["environment"].items():
        if value is not None:
            value = re.sub(r"\$\{\w+:\?[^}]*\}", PASSWORD, value)
            clean[key] = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value).replace("redis://valkey:6379/0", url)
    return clean | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


# --- what the files say ----------------------------------------------------------------------------------


def test_the_queue_survives_a_restart_of_the_server() -> None:
    """A shipped file without persistence, or with the volume beside the data, lost whole queues (case C15)."""
    options = pairs(SERVICES["valkey"]["command"])
    assert options["--appendonly"] == "yes"
    assert options["--appendfsync"] == "always"
    assert options["--dir"] == "/data"
    assert SERVICES["valkey"]["volumes"] == ["valkey-data:/data"]
    assert "valkey-data" in COMPOSE["volumes"]


def test_the_server_evicts_nothing() -> None:
    assert pairs(SERVICES["valkey"]["command"])["--maxmemory-policy"] == "noeviction"


def test_the_server_cannot_be_reached_from_outside() -> None:
    """A shipped Redis that was open on all interfaces (case J08)."""
    assert "ports" not in SERVICES["valkey"]
    assert SERVICES["valkey"]["networks"] == ["redis"]
    assert COMPOSE["networks"]["redis"]["internal"] is True


def test_the_dashboard_is_published_on_loopback_only_behind_a_password_and_may_not_delete() -> None:
    dashboard = SERVICES["dashboard"]
    assert dashboard["ports"] == ["127.0.0.1:9181:9181"]
    assert dashboard["environment"]["RQ_DASHBOARD_USERNAME"]
    assert re.match(r"\$\{BATON_DASHBOARD_PASSWORD:\?.+\}$", dashboard["environment"]["RQ_DASHBOARD_PASSWORD"])
    assert "--disable-delete" in dashboard["command"]
    assert not {"--password", "--username", "-u", "--redis-url"} & set(dashboard["command"])
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["dashboard"]


def test_workers_have_no_names_and_listen_on_one_queue() -> None:
    """A fixed name is refused for minutes after a kill -9 (case C10); two queues lose jobs (case M14)."""
    assert SERVICES["worker"]["command"] == ["rq", "worker", "-w", "worker.fleet.ForkWorker", "agents"]
    assert all("container_name" not in service and "hostname" not in service for service in SERVICES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_restarts_is_checked_and_gets_time_to_stop(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"]
    if name != "valkey":
        assert service["init"] is True
        assert service["depends_on"] == {"valkey": {"condition": "service_healthy"}}


def test_workers_get_time_to_hand_their_task_over_and_share_a_workspace() -> None:
    assert int(SERVICES["worker"]["stop_grace_period"].removesuffix("s")) >= Settings().drain_grace_s + 5
    assert SERVICES["worker"]["volumes"] == ["workspace:/workspace"]
    assert "workspace" in COMPOSE["volumes"]


def test_the_key_is_passed_on_and_never_written_down() -> None:
    for name in ("worker", "sweeper"):
        assert SERVICES[name]["environment"]["ANTHROPIC_API_KEY"] is None
    assert "ANTHROPIC_API_KEY" not in SERVICES["dashboard"]["environment"]
    assert "BATON_DASHBOARD_PASSWORD" not in SERVICES["worker"]["environment"]


@pytest.mark.parametrize("name", ["worker", "sweeper"])
def test_every_variable_is_one_that_exists(name: str) -> None:
    known = {PREFIX + field.upper() for field in Settings.model_fields}
    given = {key for key in SERVICES[name]["environment"] if key.startswith(PREFIX)}
    assert given <= known


def test_the_example_of_env_names_only_what_exists_and_holds_no_secret() -> None:
    lines = [line.lstrip("#") for line in (ROOT / ".env.example").read_text().splitlines() if "=" in line]
    given = {key: value for key, _, value in (line.partition("=") for line in lines) if re.fullmatch(r"\w+", key)}
    known = {PREFIX + field.upper() for field in Settings.model_fields}
    known |= {"ANTHROPIC_API_KEY", "BATON_DASHBOARD_PASSWORD", "BATON_DASHBOARD_USER"}
    assert set(given) <= known
    assert given["ANTHROPIC_API_KEY"] == given["BATON_DASHBOARD_PASSWORD"] == ""


def test_the_image_is_locked_compiled_and_does_not_run_as_root() -> None:
    *_, final = DOCKERFILE.split("\nFROM ")
    assert DOCKERFILE.count("FROM python:3.13-slim") == 2
    assert "uv sync --locked --no-dev --no-editable" in DOCKERFILE
    assert "UV_COMPILE_BYTECODE=1" in DOCKERFILE
    assert "PYTHONDONTWRITEBYTECODE" not in DOCKERFILE
    assert "ca-certificates" in final
    assert re.search(r"^USER (?!root|0)\w+$", final, re.MULTILINE)


def test_an_agents_files_are_not_on_the_import_path_of_its_worker() -> None:
    """`rq worker` puts its working directory first on the path; tools write into the workspace."""
    (directory,) = re.findall(r"^WORKDIR (\S+)$", DOCKERFILE.split("\nFROM ")[-1], re.MULTILINE)
    assert not Path(directory).is_relative_to("/workspace")


def test_the_build_context_holds_what_is_copied_and_no_secret() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--)(.+)$", DOCKERFILE, re.MULTILINE)]
    sources = {source for line in copied for source in line}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)
    assert "\n*\n" in (ROOT / ".dockerignore").read_text()


# --- what the commands do --------------------------------------------------------------------------------


@pytest.fixture
def compose_server(
    server_binary: Path, short_dir: Path, start_process: Callable[..., Proc]
) -> Callable[[], tuple[Proc, str]]:
    """Start the compose file's own server command on loopback, with `short_dir` as its volume."""
    port = free_port()

    def start() -> tuple[Proc, str]:
        command = [str(server_binary), *SERVICES["valkey"]["command"][1:]]
        command = [str(short_dir) if part == "/data" else part for part in command]
        process = start_process([*command, "--port", str(port), "--bind", "127.0.0.1"], name="valkey")
        url = f"redis://127.0.0.1:{port}/0"
        wait_until(lambda: answers(url), "the server")
        return process, url

    return start


@pytest.mark.server
def test_fifty_queued_jobs_survive_a_kill_of_the_compose_server_and_run(
    compose_server: Callable[[], tuple[Proc, str]], start_process: Callable[..., Proc]
) -> None:
    process, url = compose_server()
    with client(url) as connection:
        queue = Queue("agents", connection=connection)
        for number in range(50):
            queue.enqueue(ENTRY_POINT, f"unknown-{number}", 1)  # says that there is no such task, and is done
    process.kill()

    _, url = compose_server()
    with client(url) as connection:
        assert Queue("agents", connection=connection).count == 50
        burst = [*SERVICES["worker"]["command"], "--burst"]
        assert start_process(burst, env=environment("worker", url)).wait(60) == 0
        assert Queue("agents", connection=connection).finished_job_registry.get_job_count(cleanup=False) == 50


@pytest.mark.server
@pytest.mark.fleet
def test_the_worker_command_waits_for_jobs_and_is_healthy_only_with_a_server(
    new_server: Callable[..., Server], start_process: Callable[..., Proc], tmp_path: Path
) -> None:
    server = new_server(port=0)
    environ = environment("worker", server.url)
    worker = start_process(SERVICES["worker"]["command"], env=environ, cwd=tmp_path)
    wait_until(lambda: _waits_for_jobs(server.url), "a worker that waits for jobs", timeout=30)
    check = SERVICES["worker"]["healthcheck"]["test"]
    assert check[0] == "CMD"
    assert subprocess.run(check[1:], env=environ, cwd=tmp_path, timeout=30).returncode == 0
    assert worker.terminate(30) == 0
    server.stop()
    assert subprocess.run(check[1:], env=environ, cwd=tmp_path, timeout=30, capture_output=True).returncode != 0


@pytest.mark.server
@pytest.mark.fleet
def test_a_killed_worker_container_starts_again_at_once(
    new_server: Callable[..., Server], start_process: Callable[..., Proc], tmp_path: Path
) -> None:
    """With a fixed name the second one would be refused until the first one's key expires (case C10)."""
    server = new_server(port=0)
    environ = environment("worker", server.url)
    first = start_process(SERVICES["worker"]["command"], env=environ, cwd=tmp_path)
    wait_until(lambda: _waits_for_jobs(server.url), "a worker that waits for jobs", timeout=30)
    first.kill()
    wait_until(lambda: not _waits_for_jobs(server.url), "the end of its connection")
    second = start_process(SERVICES["worker"]["command"], env=environ, cwd=tmp_path)
    wait_until(lambda: _waits_for_jobs(server.url), "its successor", timeout=30)
    second.assert_running()


def _waits_for_jobs(url: str) -> bool:
    with client(url, timeout=5) as asking:
        return any(peer["cmd"].lower().startswith("blmove") for peer in asking.client_list())


@pytest.mark.server
@pytest.mark.fleet
def test_the_sweeper_command_gets_to_its_server_and_stops_in_time(
    new_server: Callable[..., Server], start_process: Callable[..., Proc], tmp_path: Path
) -> None:
    known = subprocess.run([BIN / "baton", "sweep", "--help"], capture_output=True, timeout=60).returncode == 0
    if not known and os.environ.get("CI") != "true":
        pytest.skip("`baton` has no `sweep` yet")
    server = new_server(port=0)
    sweeper = start_process(SERVICES["sweeper"]["command"], env=environment("sweeper", server.url), cwd=tmp_path)

    def connected() -> bool:
        sweeper.assert_running()
        with client(server.url, timeout=5) as asking:
            return len(asking.client_list()) > 1

    wait_until(connected, "the sweeper's connection", timeout=30)
    sweeper.signal(signal.SIGTERM)
    sweeper.wait(int(SERVICES["sweeper"]["stop_grace_period"].removesuffix("s")))


@pytest.mark.server
@pytest.mark.fleet
def test_the_dashboard_command_asks_for_the_password_and_is_healthy(
    new_server: Callable[..., Server], start_process: Callable[..., Proc], tmp_path: Path
) -> None:
    """A dashboard that does not start with the installed RQ (case J03), or lets everybody in (case J05)."""
    server, port = new_server(port=0), str(free_port())
    places = {"0.0.0.0": "127.0.0.1", "9181": port}
    environ = environment("dashboard", server.url)
    command = [places.get(part, part) for part in SERVICES["dashboard"]["command"]]
    dashboard = start_process(command, env=environ, cwd=tmp_path)
    check = [part.replace("9181", port) for part in SERVICES["dashboard"]["healthcheck"]["test"][1:]]

    def healthy() -> bool:
        dashboard.assert_running()
        return subprocess.run(check, env=environ, capture_output=True, timeout=30).returncode == 0

    wait_until(healthy, "a healthy dashboard", timeout=30, poll_s=0.2)
    page = f"http://127.0.0.1:{port}/0/data/queues.json"
    assert _status(page) == 401
    assert _status(page, password="wrong") == 401
    assert _status(page, password=PASSWORD) == 200
    shown = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(dashboard.pid)], capture_output=True, text=True)
    assert "rq-dashboard" in shown.stdout
    assert PASSWORD not in shown.stdout


def _status(url: str, password: str | None = None) -> int:
    request = urllib.request.Request(url)
    if password is not None:
        request.add_header("Authorization", "Basic " + base64.b64encode(f"baton:{password}".encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        refusal.close()
        return refusal.code
