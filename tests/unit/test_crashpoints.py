"""Crash points: inert by default, and a real SIGKILL exactly where they were told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.crashpoints import POINTS, check_crash_after, crash_point
from worker.jobs import run_task

PASS_THREE = """
from worker.crashpoints import crash_point
for n in (1, 2, 3):
    print(n, flush=True)
    crash_point("after-save-a")
"""


def passes(code: str = PASS_THREE, **environ: str) -> tuple[int, list[str]]:
    """(exit code, what was printed) of a process that passes points."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CRASH_")}
    done = subprocess.run([sys.executable, "-c", code], env={**clean, **environ}, capture_output=True, text=True)
    return done.returncode, done.stdout.split()


@pytest.fixture(autouse=True)
def _no_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CRASH_AFTER", raising=False)


def test_without_orders_every_point_is_inert() -> None:
    for label in POINTS:
        crash_point(label)


@pytest.mark.parametrize(("order", "printed"), [("after-save-a", 1), ("after-save-a:1", 1), ("after-save-a:3", 3)])
def test_the_nth_passing_kills(order: str, printed: int) -> None:
    code, lines = passes(CRASH_AFTER=order)
    assert (code, len(lines)) == (-9, printed), "SIGKILL: no finally, no atexit, no lease release"


@pytest.mark.parametrize("order", ["after-save-a:4", "after-save-b:1", ""])
def test_control_other_orders_let_it_pass(order: str) -> None:
    assert passes(CRASH_AFTER=order) == (0, ["1", "2", "3"])


def test_nothing_is_tidied_up_on_the_way_out() -> None:
    tidy = "import atexit\natexit.register(print, 'tidied')"
    code = f"{tidy}\ntry:\n    exec({PASS_THREE!r})\nfinally:\n    print('tidied')"
    assert passes(code, CRASH_AFTER="after-save-a:2") == (-9, ["1", "2"])


def test_of_a_fleet_with_one_environment_one_process_dies(tmp_path: Path) -> None:
    once = {"CRASH_AFTER": "after-save-a:2", "CRASH_ONCE": str(tmp_path / "died")}
    assert passes(**once) == (-9, ["1", "2"])
    assert passes(**once) == (0, ["1", "2", "3"])


def test_a_misspelt_point_in_the_code_is_an_error_once_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRASH_AFTER", "after-save-a:9")
    with pytest.raises(ValueError, match="no crash point is called 'after-saev-a'"):
        crash_point("after-saev-a")


@pytest.mark.parametrize("order", ["after-save-a", "after-save-a:1", "before-finish:12"])
def test_good_orders_are_accepted(order: str) -> None:
    check_crash_after(order)


@pytest.mark.parametrize("order", ["", "nowhere", "after-save-a:0", "after-save-a:-1", "after-save-a:x", ":1", "A"])
def test_bad_orders_are_refused_with_the_list_of_points(order: str) -> None:
    with pytest.raises(ValueError, match="after-claim") as refused:
        check_crash_after(order)
    assert all(label in str(refused.value) for label in POINTS)


def test_every_point_is_passed_somewhere_in_the_worker() -> None:
    """A point nobody passes would be a drill that proves nothing."""
    sources = [path.read_text() for path in (Path(__file__).parents[2] / "worker").rglob("*.py")]
    missing = [label for label in POINTS if not any(f'crash_point("{label}")' in source for source in sources)]
    assert missing == []


def test_an_order_that_kills_nobody_is_refused_before_the_task_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped label did nothing, and the drill passed."""
    check_crash_after()
    monkeypatch.setenv("CRASH_AFTER", "after-effect")
    check_crash_after()
    for wrong in ("after-efect", "after-effect:x", "after-effect:0"):
        monkeypatch.setenv("CRASH_AFTER", wrong)
        with pytest.raises(ValueError, match="after-effect-write"):
            run_task("t1", 1)
