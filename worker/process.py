"""Who runs here, in words another process on this host can check later.

A pid alone proves nothing: it is used again, and means something else in another container. Boot id, pid
namespace, pid and the process's start time together name one process for ever.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

_GONE_STATES = "ZX"  # a zombie runs nothing any more, it only waits for its parent to look


def this_process() -> dict[str, Any]:
    """JSON for a task's `owner` field. Without /proc (macOS) only host and pid: shown to people, proving nothing."""
    found = _stat(os.getpid())
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot": _boot_id(),
        "pidNamespace": _pid_namespace(),
        "startedAtTicks": found[1] if found else None,
    }


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


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
