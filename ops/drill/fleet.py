"""The drill's processes: workers and sweepers in slots, each replaced as soon as it is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ops.processes import tail
from worker.errors import BatonError

READY_MAX_S = 90
END_MAX_S = 20
BY_ITSELF_PAUSE_S = 0.3


class EnvironmentFailed(BatonError):
    """The drill could not be held: it says nothing about the product."""

    exit_code = 3


@dataclass
class Slot:
    """A place for one process after another. `pid` is 0 while there is none."""

    name: str
    run: str
    env: dict[str, str] = field(default_factory=dict)
    pid: int = 0
    pids: list[int] = field(default_factory=list)
    due: float = 0.0  # not to be started before
    asked: bool = False
    since: float = 0.0  # when its process was started

    @property
    def alive(self) -> bool:
        return self.pid != 0


class Fleet:
    """Speaks to the nursery. `pump` is to be called often: it notices deaths and fills empty slots."""

    def __init__(self, home: Path, environ: Mapping[str, str]) -> None:
        self.home = home
        self.slots: list[Slot] = []
        self.filling = True  # off while the server is away: RQ's worker ends at once without one
        self.log = home / "nursery.log"
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                # -P: a directory named `ops` where the user stands must not be taken for ours.
                [sys.executable, "-P", "-m", "ops.drill.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(environ),
                cwd=home / "workspace",  # no .env in it
                start_new_session=True,
            )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._in, self._out = self._child.stdin, self._child.stdout
        os.set_blocking(self._out.fileno(), False)
        self._buffer = b""
        self._ready = False
        self.exits: dict[int, tuple[float, int]] = {}  # pid → when, waitpid's status

    def await_ready(self) -> None:
        """Wait until everything is imported. Raises EnvironmentFailed."""
        until = time.monotonic() + READY_MAX_S
        while not self._ready:
            self.pump()
            if time.monotonic() > until:
                raise EnvironmentFailed(f"the workers' imports took longer than {READY_MAX_S} s; see {self.log}")
            time.sleep(0.02)

    def add(self, name: str, run: str, **env: str) -> Slot:
        self.slots.append(Slot(name, run, env))
        return self.slots[-1]

    def pump(self) -> None:
        """Hear what the nursery says, then start what is missing. Raises EnvironmentFailed if it has ended."""
        for said in self._heard():
            self._note(said)
        if not self._ready:
            return
        now = time.monotonic()
        for number, slot in enumerate(self.slots):
            if not slot.alive and not slot.asked and self.filling and now >= slot.due:
                slot.asked = True
                env = {"DRILL_NAME": slot.name, **slot.env}
                log = str(self.home / f"{slot.name}.log")
                self._ask({"start": number, "run": slot.run, "log": log, "env": env})

    def kill(self, slot: Slot, *, then: int = 0) -> None:
        """SIGKILL by the process's own parent: its number cannot have passed to another. `then`: a child of its, to be
        killed in the same moment."""
        self._ask({"kill": slot.pid, "then": then})

    def terminate(self, slot: Slot) -> None:
        """SIGTERM: told to go, it may take its time."""
        self._ask({"kill": slot.pid, "signal": int(signal.SIGTERM)})

    def slot_of(self, pid: int) -> Slot | None:
        """The slot whose process has, or had, this pid."""
        return next((slot for slot in self.slots if pid in slot.pids), None)

    def running(self, run: str) -> list[Slot]:
        return [slot for slot in self.slots if slot.run == run and slot.alive]

    def close(self) -> None:
        """End all of it, for certain."""
        with suppress(OSError):
            self._in.close()
        try:
            self._child.wait(END_MAX_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._out.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, what: dict[str, Any]) -> None:
        try:
            self._in.write(json.dumps(what).encode() + b"\n")
            self._in.flush()
        except OSError:
            raise self._failed() from None

    def _heard(self) -> list[dict[str, Any]]:
        read = self._out.read()
        if read == b"" or (not read and self._child.poll() is not None):
            raise self._failed()
        *lines, self._buffer = (self._buffer + (read or b"")).split(b"\n")
        return [json.loads(line) for line in lines]

    def _note(self, said: dict[str, Any]) -> None:
        if "ready" in said:
            self._ready = True
        elif "started" in said:
            slot = self.slots[said["started"]]
            slot.pid, slot.asked = said["pid"], False
            slot.pids.append(slot.pid)
            slot.since = time.monotonic()
        for slot in self.slots:
            if slot.alive and slot.pid == said.get("exited"):
                self.exits[slot.pid] = (time.time(), said["status"])
                slot.pid = 0
                by_itself = not os.WIFSIGNALED(said["status"])
                slot.due = time.monotonic() + (BY_ITSELF_PAUSE_S if by_itself else 0)

    def _failed(self) -> EnvironmentFailed:
        self._child.wait(END_MAX_S)
        return EnvironmentFailed(f"the process that starts the workers ended. Its log ends:\n{tail(self.log)}")
