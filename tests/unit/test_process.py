"""A process is named once for ever, and "gone" is said only where it is proven."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_until
from worker import process
from worker.process import is_gone, this_process

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="without /proc nothing is ever proven")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def owner_of(pid: int) -> dict[str, Any]:
    found = process._stat(pid)
    assert found is not None
    return {**this_process(), "pid": pid, "startedAtTicks": found[1]}


def test_a_live_process_is_not_gone(child: subprocess.Popen[bytes]) -> None:
    assert not is_gone(this_process())
    assert not is_gone(owner_of(child.pid))


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_a_killed_process_is_gone(child: subprocess.Popen[bytes], reaped: bool) -> None:
    owner = owner_of(child.pid)
    child.kill()
    if reaped:
        child.wait()
    wait_until(lambda: is_gone(owner), "the proof that a killed process is gone")


def test_a_stopped_process_is_not_gone(child: subprocess.Popen[bytes]) -> None:
    """It may wake up at any time; only its lease can end its ownership."""
    owner = owner_of(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: (process._stat(child.pid) or " ")[0] == "T", "the child to stop")
    assert not is_gone(owner)


def test_the_same_pid_for_another_process_is_not_the_same_process() -> None:
    """C09: pids come again, in a restarted container at once."""
    assert is_gone({**this_process(), "startedAtTicks": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"boot": "another machine"}, {"boot": ""}, {"boot": None}, {"pidNamespace": "pid:[1]"}, {"pidNamespace": ""},
        {"pid": "1"}, {"pid": None}, {"pid": 0}, {"pid": -1}, {"startedAtTicks": None},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_checked_here_proves_nothing(change: dict[str, Any]) -> None:
    assert not is_gone({**this_process(), "startedAtTicks": 1, **change})


@pytest.mark.parametrize("owner", [{}, {"host": "h", "pid": 1}])
def test_an_owner_without_particulars_proves_nothing(owner: dict[str, Any]) -> None:
    assert not is_gone(owner)


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_a_process_that_proc_hides_is_not_gone(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """/proc mounted with hidepid hides other users' processes. A sweeper of another user would take every task away
    from its live holder, once a second, until it is dead."""
    owner = owner_of(child.pid)
    read_text = Path.read_text

    def hidden(path: Path, *args: Any, **options: Any) -> str:
        if path == Path(f"/proc/{child.pid}/stat"):
            raise error(path)
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", hidden)
    assert not is_gone(owner)
    child.kill()
    child.wait()
    assert is_gone(owner), "control: the kernel still knows the difference"


def test_another_users_process_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_allowed(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", not_allowed)
    monkeypatch.setattr(process, "_stat", lambda pid: None)
    assert not is_gone(this_process())


def test_a_pid_beyond_all_numbers_does_not_break_the_sweep() -> None:
    assert not is_gone({**this_process(), "pid": 10**30})


def test_a_name_with_brackets_does_not_shift_the_fields() -> None:
    """The second field of /proc/<pid>/stat is the program's name, whatever it holds."""
    code = "open('/proc/self/comm','w').write('a) Z 1 (b'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert not is_gone(owner_of(child.pid))
        child.kill()
