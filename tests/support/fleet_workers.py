"""Stock workers as seen from outside: their work-horses, and ways to kill them. Only pids that the test started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import Proc
from tests.support.waiting import wait_until

START_MAX_S = 90  # a worker that preloads, on a busy machine
TASK_MAX_S = 60


@dataclass
class Victim:
    """A worker that waits at a crash point to be killed; `once` holds the pids of the horse there and its worker."""

    worker: Proc
    once: Path

    def await_point(self) -> int:
        """Wait until its work-horse has recorded that it is at the point; the horse's pid."""

        def there() -> bool:
            self.worker.assert_running()
            return self.once.exists()

        wait_until(there, f"a process at its crash point ({self.once.name})", timeout=TASK_MAX_S)
        horse, parent = map(int, self.once.read_text().split())
        assert parent == self.worker.pid, "another worker's horse reached the point"
        return horse

    def kill_horse(self) -> None:
        """SIGKILL the horse alone, and let no second one die."""
        os.kill(self.await_point(), signal.SIGKILL)

    def kill_both(self) -> None:
        """SIGKILL the worker, then its horse: the worker must not live to see it."""
        horse = self.await_point()
        self.worker.kill()
        os.kill(horse, signal.SIGKILL)


def listening(worker: Proc) -> Proc:
    """Wait until it blocks for jobs."""
    worker.expect("Listening on", timeout=START_MAX_S)
    return worker


def horses(worker: Proc) -> list[int]:
    """The work-horses of a worker: the processes it forked."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == worker.pid and fields[0] not in "ZX":
                    found.append(int(entry.name))
    return found


def is_worker_on(process: Proc, queue: str) -> bool:
    return process.argv[1:3] == ["worker", queue]


def kill_both(worker: Proc) -> int:
    """SIGKILL a worker and whatever horse it has at this moment; neither sees the other go. How many horses."""
    worker.signal(signal.SIGSTOP)  # it forks no further one while we look
    found = horses(worker)
    worker.kill()
    for horse in found:
        os.kill(horse, signal.SIGKILL)
    return len(found)
