"""What tools start ends with the process that ran the tool, however that process ends.

The kernel does not do this: a child of a killed process goes on running, and so may go on changing the world while
another worker has the task. So whatever a work-horse starts inherits a mark in its environment that says, in the words
of `worker.process`, whose it is. Anybody on the same host can then tell whether that owner is gone. A child that is
forked without an exec, or given an environment without the mark, is not found.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from worker.process import adopt_orphans, has_children, is_gone, sees_own_proc, this_process

MARK = "BATON_HOLDER"
PASSES_MAX = 20


@contextmanager
def children_end_with_us(*, only_ours: bool = False) -> Iterator[None]:
    """For a work-horse: what is started within the block ends with it at the latest; if we are killed, when somebody
    calls `end_left_behind`. `only_ours`: this process was forked for the block and has no children yet; then there is
    nothing to look for if it has none at its end, which saves reading all of /proc."""
    all_known = only_ours and adopt_orphans()
    mark = json.dumps(this_process())
    before = os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(MARK, None)  # a tool may have cleared it
        else:
            os.environ[MARK] = before
        if not all_known or has_children():
            _kill_marked(lambda owner: owner == json.loads(mark))


def end_left_behind() -> int:
    """SIGKILL what processes that are gone have left running on this host. Returns how many."""
    return _kill_marked(is_gone)


def _kill_marked(chosen: Callable[[dict[str, Any]], bool]) -> int:
    """Again and again, for what was started while we looked; those that are already dying have no environment."""
    killed = 0
    for _ in range(PASSES_MAX):
        found = _kill_once(chosen)
        killed += found
        if not found:
            break
    return killed


def _kill_once(chosen: Callable[[dict[str, Any]], bool]) -> int:
    if not sees_own_proc():
        return 0
    killed = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # gone meanwhile, or another user's
            killed += _kill_if(int(entry.name), chosen)
    return killed


def _kill_if(pid: int, chosen: Callable[[dict[str, Any]], bool]) -> bool:
    # Opened before its environment is read: a pid may be used again in between, this handle cannot.
    handle = _handle(pid)
    try:
        owner = _owner(Path(f"/proc/{pid}/environ").read_bytes())
        if owner is None or not chosen(owner):
            return False
        if handle is None:
            os.kill(pid, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    finally:
        if handle is not None:
            os.close(handle)


def _handle(pid: int) -> int | None:
    """None where the kernel has no such handles, or a sandbox does not give them."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None


def _owner(environ: bytes) -> dict[str, Any] | None:
    start = f"{MARK}=".encode()
    for variable in environ.split(b"\0"):
        if variable.startswith(start):
            with suppress(ValueError):
                found = json.loads(variable.removeprefix(start))
                return found if isinstance(found, dict) else None
    return None
