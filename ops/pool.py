"""`python -m ops.pool`: so many `rq worker` processes, forked from one that has imported everything.

They share what is loaded: a worker of the pool costs a fraction of the memory and the start of one that imports for
itself. Each runs RQ's own command line, in a session of its own.

- A worker that was killed is started again at once; one that ended by itself after a pause, which grows while it
  goes on doing so.
- SIGTERM or SIGINT: every worker is told once, and waited for; then the pool ends with 0. A second signal changes
  nothing. What is still there some seconds after the grace (BATON_DRAIN_GRACE_S) is killed, and its tasks recovered.
- The pool itself killed with -9: the kernel sends its workers SIGTERM (Linux), so they drain, while a supervisor
  starts the next pool beside them.

The pool starts no thread and opens no connection, for its forks would inherit half of either.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click

from ops import forked
from ops.processes import size_of
from worker.errors import BatonError
from worker.process import signal_on_parents_death
from worker.settings import Settings, load_settings

FAREWELL_S = 3.0  # after the grace: RQ's own goodbye
PAUSE_FIRST_S, PAUSE_MAX_S = 1.0, 30.0
WELL_AFTER_S = 60.0  # a worker that ran for so long did not fail at its start
LOG_MAX_BYTES = 5_000_000
LOOK_S = 5.0


@dataclass
class Slot:
    """A place for one worker. `pid` 0: nobody there, somebody is due at `due` (monotonic seconds)."""

    name: str
    pid: int = 0
    started: float = 0.0
    due: float = 0.0
    pause_s: float = PAUSE_FIRST_S


class Pool:
    """Forks, restarts and ends the workers. To be made and run in the main thread of a process without others."""

    def __init__(self, settings: Settings, workers: int, worker_class: str, queue: str, logs: Path | None) -> None:
        self.settings = settings
        self.command = (forked.WORKER_CLASSES[worker_class], queue, settings.redis_url)
        self.logs = logs
        self.slots = [Slot(f"worker-{number}") for number in range(workers)]
        self.ending = ""
        self.ends_at = float("inf")
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def listen(self) -> None:
        """Take over the signals; before anything that takes long."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked_to_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler of ours, so that the wake-up pipe is written to
        signal.set_wakeup_fd(self._wake_write)

    def run(self) -> int:
        """Until it is told to end and all workers have."""
        told = False
        while True:
            self._reap()
            if self.ending and not told:
                _say(f"{self.ending}: {sum(1 for slot in self.slots if slot.pid)} workers are draining")
                self._signal_all(signal.SIGTERM)
                told = True
            now = time.monotonic()
            if self.ending and not any(slot.pid for slot in self.slots):
                return 0
            if now >= self.ends_at:
                _say("the grace is over: ending what is left")
                self._signal_all(signal.SIGKILL)
                self.ends_at = float("inf")
            if not self.ending:
                self._fill(now)
                self._keep_logs_short()
            self._sleep(now)

    def _asked_to_end(self, number: int, frame: object) -> None:
        if not self.ending:
            self.ends_at = time.monotonic() + self.settings.drain_grace_s + FAREWELL_S
            self.ending = signal.Signals(number).name

    def _sleep(self, now: float) -> None:
        """Until a signal comes or the next thing is due."""
        due = [slot.due for slot in self.slots if not slot.pid and not self.ending]
        wait_s = max(0.0, min([LOOK_S, self.ends_at - now, *(at - now for at in due)]))
        select.select([self._wake_read], [], [], wait_s)
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _fill(self, now: float) -> None:
        for slot in self.slots:
            if not slot.pid and slot.due <= now:
                self._start(slot)

    def _start(self, slot: Slot) -> None:
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, forked.HELD_BACK)
        slot.pid = os.fork()
        if slot.pid == 0:
            log = self.logs / f"{slot.name}.log" if self.logs else None
            forked.become(lambda: _work(parent, *self.command), log=log)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forked.HELD_BACK)
        slot.started = time.monotonic()

    def _reap(self) -> None:
        for slot in self.slots:
            if slot.pid:
                pid, status = os.waitpid(slot.pid, os.WNOHANG)
                if pid:
                    self._ended(slot, status)

    def _ended(self, slot: Slot, status: int) -> None:
        now, pid, slot.pid = time.monotonic(), slot.pid, 0
        if self.ending:
            return
        if os.WIFSIGNALED(status):
            slot.due, slot.pause_s = now, PAUSE_FIRST_S
            _say(f"{slot.name} ({pid}) terminated by {signal.Signals(os.WTERMSIG(status)).name}: starting another")
            return
        if now - slot.started > WELL_AFTER_S:
            slot.pause_s = PAUSE_FIRST_S
        slot.due = now + slot.pause_s
        _say(f"{slot.name} ({pid}) ended with {os.WEXITSTATUS(status)}: starting another in {slot.pause_s:g} s")
        slot.pause_s = min(slot.pause_s * 2, PAUSE_MAX_S)

    def _signal_all(self, number: signal.Signals) -> None:
        for slot in self.slots:
            if slot.pid:  # ours and not reaped, so the number is still its own
                os.kill(slot.pid, number)

    def _keep_logs_short(self) -> None:
        """Workers append to their files and keep them open, so a long one is copied and cut, not moved."""
        for slot in self.slots if self.logs else ():
            log = self.logs / f"{slot.name}.log"  # type: ignore[operator]  # not None: see above
            if size_of(log) > LOG_MAX_BYTES:
                shutil.copyfile(log, log.with_suffix(".log.1"))
                os.truncate(log, 0)


def _work(parent: int, worker_class: str, queue: str, url: str) -> NoReturn:
    signal_on_parents_death(signal.SIGTERM)
    if os.getppid() != parent:  # it died before we asked to be told
        sys.exit(0)
    forked.rq_worker(worker_class, queue, url)


def _say(what: str) -> None:
    click.echo(f"pool: {what}")


@click.command("pool")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1), help="How many workers to run.")
@click.option(
    "--worker-class", default="fork", show_default=True, type=click.Choice(["fork", "thread"]),
    help="One task per process, or up to BATON_CONCURRENCY tasks in each.",
)  # fmt: skip
@click.option("--queue", help="The RQ queue to work on (default: BATON_QUEUE).")
@click.option(
    "--logs", envvar="BATON_UP_LOGS", type=click.Path(file_okay=False, path_type=Path),
    help="Directory for worker-N.log; without it all workers write to the pool's own output.",
)  # fmt: skip
def main(workers: int, worker_class: str, queue: str | None, logs: Path | None) -> None:
    """Run workers that share one preloaded parent, and start each again when it ends."""
    settings = load_settings()
    pool = Pool(settings, workers, worker_class, queue or settings.queue, logs)
    pool.listen()
    forked.preload(settings)
    forked.freeze()
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        _say(f"a module in BATON_TOOLS has started threads ({names}), which no worker will have")
    sys.exit(pool.run())


if __name__ == "__main__":
    try:
        main()
    except BatonError as problem:
        click.echo(f"pool: {problem}", err=True)
        sys.exit(problem.exit_code)
