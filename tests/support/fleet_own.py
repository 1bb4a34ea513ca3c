"""A fleet on a server of its own, which may be killed, filled, made a replica or told not to write.

The supervisor of its workers is the test: `Fleet.top_up` replaces those that ended.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import redis

from ops.processes import answers, free_port
from ops.processes import client as retryless_client
from ops.valkey import OPTIONS
from ops.valkey_place import binary_path
from tests.support.fleet import Fleet, running_fleet
from tests.support.fleet_outcome import Outcome
from tests.support.fleet_workers import is_worker_on
from tests.support.processes import Proc
from tests.support.waiting import wait_until

LEASE = {"BATON_LEASE_TTL_MS": "2500", "BATON_LEASE_MARGIN_MS": "300"}
LEASE_S = 2.5

# Whose workers: RQ's own, ours that forks, ours with threads (one task at a time, to be asked the same questions).
CLASSES = {
    "stock": {},
    "fork": {"RQ_WORKER_CLASS": "worker.fleet.ForkWorker"},
    "thread": {"RQ_WORKER_CLASS": "worker.fleet.ThreadWorker", "BATON_CONCURRENCY": "1"},
}


class OwnServer:
    """The embedded server as `baton up` configures it (every write is on disk before it is acknowledged), without the
    launcher, which takes a second to start; the same port and data each time."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        self.home = home
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        options = [*OPTIONS, "--dir", self.home, "--port", self.port]
        self._process = Proc([binary_path(), *map(str, options)], log=self.home / "server.log")
        wait_until(lambda: answers(self.url), "the server to have its data")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def hang(self) -> None:
        """It keeps its connections and answers nothing."""
        self._process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.close()

    @contextmanager
    def client(self) -> Iterator[redis.Redis]:
        with closing(retryless_client(self.url, timeout=10)) as asking:
            yield asking

    @contextmanager
    def full(self) -> Iterator[None]:
        """It has no memory left, and evicts nothing."""
        with self.client() as client:
            client.config_set("maxmemory", "1mb")
            try:
                yield
            finally:
                client.config_set("maxmemory", "0")

    @contextmanager
    def replica(self) -> Iterator[None]:
        """It follows a master that is not there: it answers, and writes nothing. Promoted again, its history is another
        one."""
        with self.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                client.execute_command("REPLICAOF", "NO", "ONE")  # type: ignore[no-untyped-call]

    @contextmanager
    def unable_to_save(self) -> Iterator[None]:
        """Its last snapshot failed, and it was told to refuse writes then: a directory stands in the file's place."""
        with self.client() as client:
            client.config_set("save", "3600 1000000")
            (self.home / "dump.rdb").mkdir()
            try:
                client.bgsave()
                wait_until(lambda: self._last_save(client) == "err", "the snapshot to fail")
                yield
            finally:
                (self.home / "dump.rdb").rmdir()
                client.config_set("save", "")

    def _last_save(self, client: redis.Redis) -> str:
        found: dict[str, Any] = client.info("persistence")
        return str(found["rdb_last_bgsave_status"])


@contextmanager
def own_fleet(home: Path, **variables: str) -> Iterator[tuple[Fleet, OwnServer]]:
    """An empty fleet with a short lease, and its server."""
    server = OwnServer(home / "redis")
    try:
        with running_fleet(home, server.url, **LEASE, **variables) as fleet:
            yield fleet, server
    finally:
        server.stop()


def refused(client: redis.Redis, code: str) -> int:
    """How often the server has answered with this error: writes of holders among them."""
    found: Any = client.info("errorstats")
    return int(found.get(f"errorstat_{code}", {}).get("count", 0))


def claimed_at_s(done: Outcome) -> list[float]:
    """When the task was claimed, in seconds since 1970, by the clock of the server."""
    return [event.at_ms / 1000 for event in done.events if event.kind == "claimed"]


def stored(fleet: Fleet, task_id: str) -> dict[str, Any]:
    """All that is stored of a task, but for when its keys end."""
    return {key: _value(fleet.redis, key) for key in fleet.store.keys.of_task(task_id)}


def _value(client: Any, key: str) -> Any:
    match client.type(key):
        case b"hash":
            return client.hgetall(key)
        case b"list":
            return client.lrange(key, 0, -1)
        case b"stream":
            return client.xrange(key)
        case _:
            return client.get(key)


def ended_workers(fleet: Fleet, queue: str) -> list[Proc]:
    return [one for one in fleet.processes if one.returncode is not None and is_worker_on(one, queue)]


def assert_each_worker_takes_a_task(fleet: Fleet, number: int, queue: str | None = None) -> None:
    """None of them is alive and deaf: as many tasks as there are workers are held at once."""
    with fleet.busy(number, queue) as held:
        horses = {fleet.task(task_id).owner["pid"] for task_id in held}
        assert len(horses) == number


def passing(seconds: float, look: Callable[[], None] = lambda: None) -> None:
    """Let time pass that is the fault's own length, looking all the while."""
    until = time.monotonic() + seconds

    def over() -> bool:
        look()
        return time.monotonic() > until

    wait_until(over, f"{seconds:g} s to pass", poll_s=0.05)
