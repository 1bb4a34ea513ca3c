"""Named points at which a process can be told to die: `CRASH_AFTER=<label>:<n>`.

The n-th passing of the point in this process (under RQ: the work-horse of one task) kills it with SIGKILL (exit 137):
no finally block, no atexit, no lease release. Without the variable a point costs one comparison. `baton crash-points`
lists them.

Two more for drills with a whole fleet in one environment: `CRASH_ONCE=<file>` lets only the first process die that
creates the file (which then holds its pid and its parent's); with `CRASH_WAIT=1` it waits there to be killed from
outside, its heartbeat still beating.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

from worker.log import event

log = logging.getLogger(__name__)

POINTS = {
    "after-claim": "the task is owned, nothing else happened yet",
    "after-model-response": "the model answered, point A is not saved: the answer is paid for again",
    "after-save-a": "point A saved: the calls are known, none has started",
    "after-start-mark": "the call is marked as started, it has not run",
    "after-effect": "the call ran, its result is not recorded",
    "after-effect-write": "the result is recorded in the ledger, point B is not saved",
    "after-save-b": "point B saved: all results are in the conversation",
    "before-finish": "the last answer is saved, the task is not closed yet",
}

_passed: dict[str, int] = {}
_lock = threading.Lock()


def crash_point(label: str) -> None:
    """Die here if CRASH_AFTER says so. `label` must be one of POINTS."""
    wanted = os.environ.get("CRASH_AFTER")
    if not wanted:
        return
    if label not in POINTS:
        raise ValueError(f"no crash point is called {label!r}")
    name, _, number = wanted.partition(":")
    if name != label:
        return
    with _lock:
        _passed[label] = _passed.get(label, 0) + 1
        if _passed[label] != int(number or 1):
            return
    if (once := os.environ.get("CRASH_ONCE")) and not _first(Path(once)):
        return
    event(log, "crash-point", level=logging.WARNING, label=label, passing=_passed[label], pid=os.getpid())
    while os.environ.get("CRASH_WAIT"):
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL)


def _first(path: Path) -> bool:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(f"{os.getpid()} {os.getppid()}\n")
    try:
        path.hardlink_to(draft)  # appears with its content or not at all
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def check_crash_after(value: str | None = None) -> None:
    """Raise ValueError with the list of labels unless `value` (else CRASH_AFTER, if set) is `<label>` or `<label>:<n>`,
    n ≥ 1: a drill that kills nobody would pass."""
    if value is None and not (value := os.environ.get("CRASH_AFTER")):
        return
    name, _, number = value.partition(":")
    if name not in POINTS or not (number or "1").isdigit() or int(number or 1) < 1:
        raise ValueError(f"CRASH_AFTER={value!r}: expected <label>:<n> with a label of {', '.join(POINTS)}")
