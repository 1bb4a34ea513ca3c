"""Who runs here, in words another process on this host can check later.

A pid alone proves nothing: it is used again, and means something else in another container. Boot id, pid
namespace, pid and the process's start time together name one process for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

_GONE_STATES = "ZX"  # a zombie runs nothing any more, it only waits for its parent to look


def this_process() -> dict[str, Any]:
    """JSON for a task's `owner` field. Without /proc (macOS) only host and pid: shown to people, proving nothing."""
    found = _stat(os.getpid())
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        **this_host(),
        "startedAtTicks": found[1] if found else None,
    }


def this_host() -> dict[str, str]:
    """The part of `this_process` that all processes who see each other's pids have in common."""
    return {"boot": _boot_id(), "pidNamespace": _pid_namespace()}


def is_gone(owner: dict[str, Any]) -> bool:
    """True only if it is proven here that the owning process does not exist any more."""
    boot, namespace, pid, started = (owner.get(key) for key in ("boot", "pidNamespace", "pid", "startedAtTicks"))
    if not boot or not namespace or not isinstance(pid, int) or pid <= 0 or started is None:
        return False
    if boot != _boot_id() or namespace != _pid_namespace():
        return False
    found = _stat(pid)
    if found is None:
        return not _exists(pid)
    return found[0] in _GONE_STATES or found[1] != started


def is_child(owner: dict[str, Any], pid: int) -> bool:
    """Is this the process `pid` of this host? For its parent, who knows that the number has not been used again: it has
    not reaped it yet, or just now."""
    return owner.get("pid") == pid and this_host().items() <= owner.items()


def signal_on_parents_death(number: signal.Signals) -> None:
    """Get this signal when the thread that forked this process ends, also over an exec. Only Linux can do this."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number, 0, 0, 0)


def adopt_orphans() -> bool:
    """Become the parent of whatever our children leave behind, so that `has_children` tells of it, too. False where the
    system cannot do it."""
    pr_set_child_subreaper = 36
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0) == 0)


def has_children() -> bool:
    """This process has some, running or not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process as soon as `parent`, which forked it, is gone; at once if it is gone already (0: nobody
    knows its pid).

    RQ leaves the work-horse of a killed worker running, and tells everybody that its job has failed.
    """
    signal_on_parents_death(signal.SIGKILL)
    if parent and os.getppid() != parent:  # it died before we asked to be told
        os.kill(os.getpid(), signal.SIGKILL)


def _exists(pid: int) -> bool:
    """Asks the kernel: a /proc mounted with hidepid does not show the processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; or no number a process could have
        return True
    return True


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, start time in clock ticks since boot) of a process; None if /proc shows none."""
    try:
        # The second field is the name in brackets and may hold anything, so count from its end.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return fields[0], int(fields[19])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def sees_own_proc() -> bool:
    """/proc may be missing, or be that of another pid namespace: then its numbers mean other processes."""
    try:
        return str(Path("/proc/self").readlink()) == str(os.getpid())
    except OSError:
        return False


def _pid_namespace() -> str:
    if not sees_own_proc():
        return ""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
