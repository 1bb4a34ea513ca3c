"""The process that a drill's workers and sweepers are forked from.

A worker spends 2 to 3 seconds of CPU on imports, and a drill kills dozens. So one process imports everything once and
forks on request; a fork runs RQ's own command line as any `rq worker` does. It is never a victim, reaps what died (also
the work-horses that a killed worker leaves), and ends everything it forked when the drill goes away.

Lines on stdin: {"start": number, "run": "worker" | "sweeper", "log": path, "env": {…}}, and {"kill": pid, "then": pid
of its work-horse}. On stdout: {"ready": true}, {"started": number, "pid": pid}, {"exited": pid, "status": waitpid's}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from ops import forked

CLASS_VARIABLE = "DRILL_WORKER_CLASS"
SABOTAGE_VARIABLE, PATH_VARIABLE = "DRILL_SABOTAGE", "DRILL_PATH"
NONCE_KEY, NONCE_VARIABLE = "drill:nonce", "DRILL_NONCE"
PR_SET_CHILD_SUBREAPER = 36

Json = dict[str, Any]


def preload() -> None:
    """All that a worker, a work-horse or a sweeper imports; and the sabotage, if this drill is one."""

    import worker.sweeper  # noqa: F401
    from worker.settings import load_settings

    # Last, so that nothing of the user's is taken for ours.
    sys.path.append(os.environ[PATH_VARIABLE])
    settings = load_settings()
    forked.preload(settings)
    if name := os.environ.get(SABOTAGE_VARIABLE):
        from ops.drill.sabotage import take_away

        take_away(name, settings)
    forked.freeze()


class Nursery:
    """Forks, and tells of deaths."""

    def __init__(self) -> None:
        self.children: set[int] = set()
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler of ours, so that the wake-up pipe is written to
        signal.set_wakeup_fd(self.wake_write)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def serve(self) -> None:
        """Until stdin ends: then nobody is left to want these processes."""
        _say({"ready": True})
        buffer = b""
        while True:
            readable, _, _ = select.select([0, self.wake_read], [], [])
            if self.wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_read, 4096)
            self.reap()
            if 0 not in readable:
                continue
            read = os.read(0, 65_536)
            if not read:
                return
            *lines, buffer = (buffer + read).split(b"\n")
            for line in lines:
                self.obey(json.loads(line))

    def obey(self, asked: Json) -> None:
        if "start" in asked:
            self.start(asked)
        elif asked["kill"] in self.children:  # ours and not reaped, so the number is still its own
            os.kill(asked["kill"], asked.get("signal", signal.SIGKILL))
            if horse := asked.get("then"):  # it is ours too from now on
                with contextlib.suppress(ProcessLookupError):
                    os.kill(horse, signal.SIGKILL)

    def start(self, asked: Json) -> None:
        pid = os.fork()
        if pid == 0:
            command = _sweeper if asked["run"] == "sweeper" else _worker
            forked.become(command, log=Path(asked["log"]), environ=asked.get("env"))
        self.children.add(pid)
        _say({"started": asked["start"], "pid": pid})

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if pid in self.children:  # else a horse that lost its worker
                    self.children.discard(pid)
                    _say({"exited": pid, "status": status})

    def end(self) -> None:
        """Kill what is left, and what that leaves, until there is nobody any more."""
        signal.set_wakeup_fd(-1)
        with contextlib.suppress(ChildProcessError):
            while True:
                for pid in _children_of(os.getpid()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)


def _say(what: Json) -> None:
    # The drill may be gone; then stdin has ended too, and that is what ends us.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(what).encode() + b"\n")


def _children_of(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry.name))
    return found


def _worker() -> int:
    """Ends with SystemExit."""
    worker_class = forked.WORKER_CLASSES[os.environ.get(CLASS_VARIABLE) or "fork"]
    forked.rq_worker(worker_class, os.environ["BATON_QUEUE"], os.environ["BATON_REDIS_URL"])


def _sweeper() -> int:
    from enqueue.command import run_command
    from ops.cli import cli

    return run_command(cli, "baton", ["sweep"])


def main() -> int:
    from worker.errors import BatonError

    try:
        preload()
    except BatonError as error:
        print(f"nursery: {error}", file=sys.stderr)
        return error.exit_code
    nursery = Nursery()
    try:
        nursery.serve()
    finally:
        nursery.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
