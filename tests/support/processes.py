"""Real processes under test: started with a log file, ended for certain, and nothing else is ever touched."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ops.processes import free_port
from tests.support.waiting import wait_until

__all__ = ["Proc", "alive", "free_port"]

MARK = "BATON_TEST_MARK"


def alive(pid: int) -> bool:
    """The process exists and runs: a zombie that its parent has not reaped yet does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


class Proc:
    """A command in a session of its own, its output in a log file.

    Everything it starts carries a mark in its environment, so that `close` finds (and kills) descendants that
    moved to other process groups or sessions, and only those.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.argv = [str(part) for part in argv]
        self.log = log
        self.mark = uuid.uuid4().hex
        self._sessions: set[int] = set()
        environ = dict(os.environ if env is None else env) | {MARK: self.mark, "PYTHONUNBUFFERED": "1"}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._child = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=cwd,
                start_new_session=True,
            )
        self.pid = self._child.pid

    @property
    def returncode(self) -> int | None:
        return self._child.poll()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def assert_running(self) -> None:
        assert self.returncode is None, f"{self.argv} ended with {self.returncode}:\n{self.output()}"

    def expect(self, text: str, *, timeout: float = 60) -> None:
        """Wait until the log holds `text`; fail at once if the process ends without it."""

        def seen() -> bool:
            if text in self.output():
                return True
            self.assert_running()
            return False

        try:
            wait_until(seen, f"{text!r} in the log of {self.argv}", timeout=timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None

    def signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self, timeout: float = 60) -> int:
        """SIGTERM, then wait for the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def kill(self) -> int:
        """SIGKILL to this one process, as `kill -9` does; its children stay."""
        self.signal(signal.SIGKILL)
        return self.wait(10)

    def wait(self, timeout: float = 60) -> int:
        try:
            return self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.argv} did not end in {timeout:g} s:\n{self.output()}") from None

    def descendants(self) -> list[int]:
        """Live processes that stem from this one, itself left out (Linux and macOS; marks are Linux only)."""
        pids = [pid for pid in _all_pids() if pid != self.pid]
        marked = [pid for pid in pids if self._is_marked(pid)]
        # valkey-server overwrites its environment with its title: its session gives it away.
        self._sessions |= {self.pid} | {sid for pid in marked if (sid := _session(pid)) is not None}
        return sorted({*marked, *(pid for pid in pids if _session(pid) in self._sessions)})

    def close(self) -> None:
        """End it and all it started, for certain."""
        deadline = time.monotonic() + 15
        self.descendants()  # learn the sessions while there is somebody to tell
        if self.returncode is None:
            self._child.kill()
        self._child.wait(10)
        while (left := self.descendants()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        assert not left, f"{self.argv} left processes behind that cannot be killed: {left}"

    def __enter__(self) -> Proc:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_marked(self, pid: int) -> bool:
        with suppress(OSError):
            return f"{MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        return False


def _all_pids() -> list[int]:
    if Path("/proc/self/stat").exists():
        candidates = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in candidates if alive(pid)]
    listing = subprocess.run(["ps", "-axo", "pid="], capture_output=True, text=True, check=True)
    return [int(word) for word in listing.stdout.split()]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
