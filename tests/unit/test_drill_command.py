"""Wrong use of `baton drill` ends with 2 and a sentence, and what it shows while it goes on."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from enqueue.command import run_command
from ops.cli import cli
from ops.drill.arena import fresh
from ops.drill.facts import Hit
from ops.drill.hold import Outcome
from ops.drill.sabotage_drill import DRILLS
from ops.drill.show import Drawn, Lines, Show, Silent, State, in_words, show_for
from ops.drill.verdict import judge
from tests.support.drill_facts import facts_of, good_task

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


@pytest.mark.parametrize("theirs", ["requests.jsonl", "link.log"])
def test_a_directory_that_only_looks_like_a_drills_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], theirs: str
) -> None:
    """Another program's log may have the same name; a link leads elsewhere."""
    home, mine = tmp_path / "drill", tmp_path / "mine"
    home.mkdir()
    mine.write_text("years of work")
    if theirs == "link.log":
        (home / "drill.lock").touch()
        (home / theirs).symlink_to(mine)
    else:
        (home / theirs).write_text("years of work")
    assert drill(tmp_path) == 2
    assert (home / theirs).read_text() == "years of work"
    assert theirs in capsys.readouterr().err


def test_what_an_earlier_drill_left_is_cleared_away(tmp_path: Path) -> None:
    home = tmp_path / "drill"
    with fresh(home):
        (home / "effects.jsonl").write_text("old")
        (home / "worker-1.log").write_text("old")
    with fresh(home):
        assert sorted(path.name for path in home.iterdir()) == ["drill.lock", "requests.jsonl", "workspace"]


def test_a_report_that_fails_does_not_cost_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    facts = facts_of(good_task(status="running"))
    monkeypatch.setattr("ops.drill.hold.hold", lambda *_: Outcome(judge(facts), facts))
    monkeypatch.setattr("ops.drill.report.write_report", full)
    assert drill(tmp_path, "--json", "--report", str(tmp_path / "report")) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["exitCode"] == 1
    assert "the report could not be written: OSError('no space left')" in told.err


def test_a_report_is_not_put_where_the_next_drill_clears_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drill(tmp_path, "--report", str(tmp_path / "drill" / "report")) == 2
    assert "would be cleared away" in capsys.readouterr().err


def test_with_json_a_wrong_use_is_one_document_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drill(tmp_path, "--json", "--kill", "luck") == 2
    assert json.loads(capsys.readouterr().out)["exitCode"] == 2


def test_the_help_tells_the_kinds_of_kills_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(cli, "baton", ["drill", "--help"]) == 0
    out = capsys.readouterr().out
    for words in ("SIGSTOP of the work-horse past its lease", "a guarantee broken", "the environment failed"):
        assert words in out
    assert ", ".join(DRILLS) in " ".join(out.split())


def test_a_job_that_was_lost_or_doubled_is_not_told_as_a_kill() -> None:
    assert in_words(Hit("job", 1.0, 0, "doubled the job of task-1")) == "doubled the job of task-1"


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
