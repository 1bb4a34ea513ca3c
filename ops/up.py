"""`baton up`: a whole local fleet in one terminal, supervised, with restarts.

It starts supervisord, which runs an embedded Valkey (unless a server answers at BATON_REDIS_URL already), a pool of
`rq worker` processes that share one preloaded parent (ops.pool), the sweeper and rq-dashboard, and starts each of
them again when it dies. Ctrl-C, SIGTERM and a closed terminal stop all of it, the server last; the data stays in the
state directory. All logs are in its `logs`; here they are shown with the program's name before each line (the
server's chatter is left out).

When something is killed with -9:

- a worker: the pool starts another at once;
- one of the programs: supervisord starts it again at once (the workers of a killed pool drain meanwhile);
- `baton up` itself: supervisord and everything under it go on, out of sight (their logs go on too). The next
  `baton up` in the directory stops what was left and starts anew on the same data;
- supervisord: its programs get SIGTERM from the kernel (Linux) and `baton up` ends with an error. Elsewhere they
  stay, unsupervised: the next `baton up` uses the server that answers, stands by to replace it, and goes on
  without a dashboard if its port is still taken.

While one `baton up` runs, a second one in the same state directory is refused: two would fight over one data
directory and one set of logs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.table import Table

from ops import stack
from ops.forked import WORKER_CLASSES
from ops.processes import (
    answers,
    free_port,
    lock_is_free,
    port_is_free,
    tail,
    try_lock,
    wait_until,
)
from ops.valkey import recorded
from ops.valkey_place import checked_socket, place_of
from worker.dispatch import open_store
from worker.errors import BatonError, RedisUnavailable
from worker.settings import Settings, load_settings
from worker.state.transact import shown_url

SERVER_WAIT_S = 20
STOP_WAIT_S = 35  # beside the workers' time: dashboard 5, sweeper 10, server 10, and some air
WORKERS_MAX = 256


def run_stack(
    settings: Settings, workers: int, *, worker_class: str = "fork", dashboard: bool = True, quiet: bool = False
) -> int:
    """Run the stack until it is told to stop; the exit code. `quiet` keeps the programs' logs in their files.
    `worker_class`: one of `WORKER_CLASSES`.

    Raises RedisUnavailable when there is no server and none can be started, BatonError when another
    `baton up` owns the state directory. To be called in the main thread: it takes over SIGINT, SIGTERM and SIGHUP.
    """
    home = settings.state_dir
    (home / "logs").mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)  # logs and data hold what tasks are about
    with _only_one(home):
        stop_wait_s = stack.worker_stop_s(settings) + STOP_WAIT_S
        _end_what_was_left(home, stop_wait_s)
        server, standby = _server_plan(settings.redis_url, home / "valkey")
        if not server or standby:
            _promise(settings)  # somebody else's: look at it before anything is started
        port = _dashboard_port(settings.dashboard_port) if dashboard else None
        parts = stack.programs(
            settings, workers, server=server, standby=standby, dashboard_port=port, worker_class=worker_class
        )
        (home / "supervisord.conf").write_text(stack.configuration(parts))
        environ = stack.environment(settings)
        _warn_without_key(environ)
        tail_logs = stack.LogTail(home / "logs", show=_silence if quiet else click.echo)
        with _supervisord(home, environ, stop_wait_s) as child:
            _await_server(settings.redis_url, child, tail_logs, home)
            if child.poll() is None:
                started = server and not standby
                running = f"{workers} x rq worker -w {WORKER_CLASSES[worker_class]} {settings.queue}"
                _print_table(settings, running, promise=_promise(settings), started=started, port=port)
            return _watch(child, tail_logs, home)


@click.command("up")
@click.option(
    "--workers", default=2, show_default=True, type=click.IntRange(0, WORKERS_MAX), help="How many workers to run."
)
@click.option(
    "--worker-class", default="fork", show_default=True, type=click.Choice(list(WORKER_CLASSES)),
    help="One task per process, up to BATON_CONCURRENCY tasks in each, or RQ's own worker.",
)  # fmt: skip
@click.option("--no-dashboard", is_flag=True, help="Run without rq-dashboard.")
@click.option("--quiet", is_flag=True, help="Do not show the programs' logs here.")
def up(workers: int, worker_class: str, no_dashboard: bool, quiet: bool) -> None:
    """Run Redis, workers, the sweeper and a dashboard here, with restarts, until Ctrl-C."""
    dashboard = not no_dashboard
    sys.exit(run_stack(load_settings(), workers, worker_class=worker_class, dashboard=dashboard, quiet=quiet))


@contextmanager
def _only_one(home: Path) -> Iterator[None]:
    lock = try_lock(home / "up.lock")
    if lock is None:
        owner = (home / "up.lock").read_text().strip()
        raise BatonError(f"`baton up` already runs in {home} (pid {owner}): stop that one first")
    try:
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)


def _end_what_was_left(home: Path, stop_wait_s: float) -> None:
    """Stop the supervisord of a `baton up` that was killed with -9."""
    lock = home / stack.SUPERVISOR_LOCK
    if lock_is_free(lock):
        return
    # The lock proves that the pid in the file is still that supervisord's, and nobody else's.
    try:
        pid = int((home / "supervisord.pid").read_text())
    except (OSError, ValueError):
        raise BatonError(f"an earlier `baton up` left a supervisord that is just starting in {home}") from None
    click.echo(f"baton: an earlier `baton up` was killed; stopping what it left (supervisord {pid})", err=True)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    if not wait_until(lambda: lock_is_free(lock), stop_wait_s, poll_s=0.1):
        raise BatonError(f"supervisord {pid}, left by an earlier `baton up`, does not stop")


def _server_plan(url: str, directory: Path) -> tuple[bool, bool]:
    """(run a server program, only as a standby for the one that answers already)."""
    held = not lock_is_free(directory / "server.lock")
    if answers(url, timeout=2):
        record = recorded(directory)
        return (True, True) if held and record and _same_place(record.url, url) else (False, False)
    place = place_of(url)
    checked_socket(place.unix_socket)
    if held:
        record = recorded(directory)
        where = record.url if record else "an unknown place"
        raise RedisUnavailable(f"the data in {directory} is served at {where}, not at {shown_url(url)}")
    if place.port is not None and not port_is_free(place.port):
        raise RedisUnavailable(
            f"something listens on 127.0.0.1:{place.port} but does not answer PING (another password?)"
        )
    return True, False


def _same_place(one: str, other: str) -> bool:
    try:
        a, b = place_of(one), place_of(other)
    except RedisUnavailable:
        return False
    return (a.port, a.unix_socket) == (b.port, b.unix_socket)


def _dashboard_port(wanted: int) -> int | None:
    if wanted == 0:
        return free_port()
    if port_is_free(wanted):
        return wanted
    click.echo(f"baton: port {wanted} is taken: going on without a dashboard (BATON_DASHBOARD_PORT)", err=True)
    return None


def _warn_without_key(environ: dict[str, str]) -> None:
    if not environ.get("ANTHROPIC_API_KEY") and not environ.get("ANTHROPIC_BASE_URL"):
        click.echo("baton: ANTHROPIC_API_KEY is not set: tasks will wait for a key", err=True)


@contextmanager
def _supervisord(home: Path, environ: dict[str, str], stop_wait_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """supervisord as our child, in a session of its own, so that only we decide when it stops."""
    lock = try_lock(home / stack.SUPERVISOR_LOCK)
    if lock is None:
        raise BatonError(f"a supervisord runs in {home}")
    argv = [sys.executable, "-P", "-m", "supervisor.supervisord", "-c", "supervisord.conf"]
    with (home / "logs" / "supervisord.out").open("wb") as out:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=home,
            env=environ,
            start_new_session=True,
            pass_fds=[lock],  # held by supervisord for as long as it lives, however we end
        )
    os.close(lock)

    def stop(number: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGTERM)

    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(stop_wait_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for number, handler in former.items():
            signal.signal(number, handler)


def _await_server(url: str, child: subprocess.Popen[bytes], tail_logs: stack.LogTail, home: Path) -> None:
    deadline = time.monotonic() + SERVER_WAIT_S
    while child.poll() is None and not answers(url):
        tail_logs.pump()
        if time.monotonic() > deadline:
            log = tail(home / "logs" / "valkey.log")
            raise RedisUnavailable(f"the server at {shown_url(url)} did not come up. Its log ends:\n{log}")
        time.sleep(0.05)


def _watch(child: subprocess.Popen[bytes], tail_logs: stack.LogTail, home: Path) -> int:
    while child.poll() is None:
        tail_logs.pump()
        time.sleep(0.1)
    tail_logs.pump()
    if child.returncode == 0:
        return 0
    said = tail(home / "logs" / "supervisord.out")
    raise BatonError(f"supervisord ended by itself ({child.returncode}); it said:\n{said}")


def _promise(settings: Settings) -> str:
    """What the server keeps, in words. Raises ServerUnfit."""
    store = open_store(settings)
    try:
        store.require_fit(force=settings.allow_eviction)
        return store.promise()
    finally:
        store.client.close()


def _print_table(settings: Settings, workers: str, *, promise: str, started: bool, port: int | None) -> None:
    home = settings.state_dir
    table = Table(title="baton is up", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    origin = f"started here, data in {home / 'valkey'}" if started else "was running already"
    rows = {
        "redis": f"{shown_url(settings.redis_url)}  ({origin})",
        "promise": promise,
        "workers": workers,
        "sweeper": "baton sweep",
        "dashboard": f"http://127.0.0.1:{port}" if port else "off",
        "logs": str(home / "logs"),
        "enqueue": 'enqueue-task "…"   (in another terminal, in this directory)',
        "stop": f"Ctrl-C   (tasks are let go of within {settings.drain_grace_s:g} s, and go on next time)",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    Console(markup=False, highlight=False).print(table)


def _silence(line: str) -> None:
    """The programs' logs are in their files."""


if __name__ == "__main__":
    try:
        up()
    except BatonError as problem:
        click.echo(f"baton: {problem}", err=True)
        sys.exit(problem.exit_code)
