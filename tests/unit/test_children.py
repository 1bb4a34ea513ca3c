"""What a tool starts ends with the process that ran the tool. Real processes; only those started here are looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.processes import alive
from tests.support.waiting import wait_until
from worker.children import MARK, children_end_with_us, end_left_behind

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")

# Starts a child in a new session, tells both pids, and waits to be killed.
STARTS_ANOTHER = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(child.pid, flush=True)
sys.stdin.read()
"""

# A work-horse: whatever it starts within the block is its own.
HORSE = f"""
from worker.children import children_end_with_us
with children_end_with_us():
    exec({STARTS_ANOTHER!r})
"""


@pytest.fixture
def started() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run(code: str, started: list[int], **environ: str) -> tuple[subprocess.Popen[str], int]:
    """(a Python that runs `code`, the pid it tells)."""
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
        env={**os.environ, "PYTHONPATH": root, **environ}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    child = int(process.stdout.readline())
    started += [process.pid, child]
    return process, child


def close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait(30)


def test_what_a_killed_horse_left_behind_ends_even_in_a_session_of_its_own(started: list[int]) -> None:
    """H10: hundreds of orphans of tools that were started with setsid."""
    horse, child = run(HORSE, started)
    horse.kill()
    close(horse)
    assert alive(child)
    assert end_left_behind() >= 1
    wait_until(lambda: not alive(child), "the orphan to end")


def test_what_a_living_horse_has_started_is_left_alone(started: list[int]) -> None:
    horse, child = run(HORSE, started)
    end_left_behind()
    assert alive(child)
    close(horse)


def test_what_is_nobodys_is_left_alone(started: list[int]) -> None:
    """The control: the same orphan, started by no work-horse."""
    other, child = run(STARTS_ANOTHER, started, **{MARK: ""})
    other.kill()
    close(other)
    end_left_behind()
    assert alive(child)


@pytest.mark.parametrize("mark", ["", "no JSON", "[]", "{}", '{"pid": 1}', '{"pid": "x", "boot": 3}'])
def test_a_mark_that_names_nobody_ends_nobody(started: list[int], mark: str) -> None:
    other, child = run(STARTS_ANOTHER, started, **{MARK: mark})
    end_left_behind()
    assert alive(other.pid)
    assert alive(child)
    close(other)


def test_at_the_end_of_the_block_a_background_child_ends_too(started: list[int]) -> None:
    """H11: the tool has returned, its child has not."""
    with children_end_with_us():
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        started.append(child.pid)
        assert alive(child.pid)
    assert child.wait(10) == -signal.SIGKILL
    assert MARK not in os.environ


def test_a_block_within_a_block_gives_the_outer_mark_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that a tool of another fleet has started."""
    monkeypatch.setenv(MARK, '{"pid": 1}')
    with children_end_with_us():
        assert os.environ[MARK] != '{"pid": 1}'
    assert os.environ[MARK] == '{"pid": 1}'
