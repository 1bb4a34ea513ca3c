"""Wrong use of `baton drill` ends with 2 and a sentence, and what it shows while it goes on."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from enqueue.command import run_command
from ops.cli import cli
from ops.drill.facts import Hit
from ops.drill.show import Drawn, Lines, Show, Silent, State, show_for

HIT = Hit("stop", 1.0, 11, "worker-1", ("task-1",))
STATE = State("kills", 12.0, 60, 31, 3, 2, 9, 20, 4, ("stop", "horse", "horse"), False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"turns": [{"text": "hello"}]}))
    return path


def drill(tmp_path: Path, *args: str) -> int:
    return run_command(cli, "baton", ["drill", "--dir", str(tmp_path / "drill"), *args])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--kill", "horse,earthquake"), "earthquake"),
        (("--kill", ","), "expected some of"),
        (("--tasks", "0"), "--tasks"),
        (("--workers", "0"), "--workers"),
        (("--seconds", "0"), "--seconds"),
        (("--turns", "1"), "--turns"),
        (("--tools", "tests.support.drill_tools"), "needs --script"),
        (("--tools", "no.such.module", "--script", "SCRIPT"), "no.such.module"),
        (("--tools", "json", "--script", "SCRIPT"), "has no tool"),
        (("--script", "missing.json"), "missing.json"),
        (("--script", "BROKEN"), "is not JSON"),
        (("--sabotage", "luck"), "expected one of fence, marker, ledger, order, sweeper, seq"),
        (("--sabotage", "fence", "--script", "SCRIPT"), "own tools"),
        (("--sabotage", "fence", "--matrix"), "exclude each other"),
        (("--report", "SCRIPT"), "is a file"),
        (("--matrix", "--tools", "tests.support.drill_tools", "--script", "SCRIPT"), "nothing to try"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_use_ends_with_2_and_a_sentence(
    tmp_path: Path, script: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], said: str
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    words = [{"SCRIPT": str(script), "BROKEN": str(broken)}.get(word, word) for word in args]
    assert drill(tmp_path, *words) == 2
    assert said in capsys.readouterr().err


def test_a_directory_that_holds_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "drill" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("years of work")
    assert drill(tmp_path) == 2
    assert mine.read_text() == "years of work"
    assert "not a drill's" in capsys.readouterr().err


def test_with_json_a_wrong_use_is_one_document_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drill(tmp_path, "--json", "--kill", "luck") == 2
    assert json.loads(capsys.readouterr().out)["exitCode"] == 2


def test_the_help_tells_the_kinds_of_kills_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(cli, "baton", ["drill", "--help"]) == 0
    out = capsys.readouterr().out
    for words in ("SIGSTOP of the work-horse past its lease", "a guarantee broken", "the environment failed"):
        assert words in out


def test_off_a_terminal_there_are_lines_and_with_json_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for show in (Lines(), Silent()):
        with show:
            show.say("hello")
            show.hit(HIT, 1.0)
            show.state(STATE)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hello"
    assert "SIGSTOP stop: worker-1, pid 11, running task-1" in lines[1]
    assert len(lines) == 3
    assert "20 of 60 done, 4 recovered, the server is away" in lines[2]


def test_on_a_terminal_one_table_is_drawn_again_and_again() -> None:
    out = io.StringIO()
    show: Show = show_for(Console(file=out, force_terminal=True, width=100), silent=False)
    assert isinstance(show, Drawn)
    with show:
        show.state(STATE)
        show.hit(HIT, 1.0)
        show.state(STATE)
    for words in ("3 (2 horse, 1 stop)", "20 of 60", "killed", "SIGSTOP stop: worker-1"):
        assert words in out.getvalue()
