"""Small facts about processes and the servers they talk to, shared by the local stack's parts."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from worker.process import signal_on_parents_death

POLL_S = 0.02


def client(url: str, timeout: float = 1.0) -> redis.Redis:
    """A client that gives up at once: redis-py's own retries make each probe of a dead server take seconds."""
    return redis.Redis.from_url(
        url, retry=Retry(NoBackoff(), 0), socket_timeout=timeout, socket_connect_timeout=timeout
    )


def answers(url: str, timeout: float = 1.0) -> bool:
    """Does a server answer PING at `url` within `timeout` seconds? One that is still loading does not."""
    try:
        with closing(client(url, timeout)) as asking:
            return bool(asking.ping())
    except (redis.RedisError, OSError, ValueError):
        return False


def wait_until(predicate: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def try_lock(path: Path) -> int | None:
    """Take the exclusive lock on `path`; the file descriptor that holds it, or None if somebody else does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def lock_is_free(path: Path) -> bool:
    """Nobody holds the exclusive lock on `path`. Asked with a shared lock, which is given back at once."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def port_is_free(port: int) -> bool:
    """127.0.0.1:`port` can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(path: Path, *, from_byte: int = 0, lines_max: int = 8) -> str:
    """The last lines of a log file, for the reader of an error."""
    if not path.exists():
        return "(no log)"
    text = path.read_bytes()[from_byte:].decode(errors="replace")
    return "\n".join(text.splitlines()[-lines_max:]) or "(nothing)"


def size_of(path: Path) -> int:
    """Bytes in the file; 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def die_with_parent() -> None:
    """Get SIGTERM when the parent dies, and keep that over an exec. Only Linux can do this.

    A supervisor that is killed with -9 would otherwise leave its programs running for ever, unsupervised.
    $BATON_UP_LOCK names a file that our supervisor keeps locked while it lives: it may have died before we asked.
    """
    signal_on_parents_death(signal.SIGTERM)
    held = os.environ.get("BATON_UP_LOCK")
    if held and lock_is_free(Path(held)):
        sys.exit("the supervisor is gone")
