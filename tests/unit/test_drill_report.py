"""Recovery times, the report and the picture, from facts made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ops.drill.facts import Event, Facts, Hit
from ops.drill.hold import Options, Outcome
from ops.drill.matrix_table import Probe, judge_line
from ops.drill.picture import MARKS
from ops.drill.plan import KINDS
from ops.drill.report import NO_PLOT, write_matrix, write_report
from ops.drill.spans import spans
from ops.drill.verdict import SINCE_BACK, judge
from ops.drill.words import lines_of, recovery_rows
from tests.support.drill_facts import TASK, effect, event, facts_of, good_task

OPTIONS = Options(seed=7, kinds=tuple(KINDS))
KILLED_AT = 10.0
JOB = Hit("job", 1.8, 0, "lost the job of task-1")


def hit(kind: str = "horse", at: float = KILLED_AT, **more: object) -> Hit:
    return Hit(kind, at, 11, "server" if kind == "redis" else "worker-1", (TASK,), **more)  # type: ignore[arg-type]


def taken(recovered_s: float, claimed_s: float) -> tuple[Event, ...]:
    return (
        event("claimed", epoch=1, at_ms=9_000),
        event("recovered", proof="gone", at_ms=int(recovered_s * 1000)),
        event("claimed", epoch=3, at_ms=int(claimed_s * 1000)),
        event("ended", status="succeeded", at_ms=12_000),
    )


def recovery(*hits: Hit, recovered_s: float = 10.2, claimed_s: float = 10.5) -> dict[str, float]:
    facts = Facts((good_task(events=taken(recovered_s, claimed_s)),), hits)
    return {kind: one.p50_s for kind, one in judge(facts).recovery.items() if one.number}


def test_recovery_is_measured_from_the_kill_to_the_next_claim() -> None:
    assert recovery(hit()) == {"horse": 0.5}


def test_a_kill_that_came_too_late_to_hit_the_task_is_not_counted() -> None:
    assert recovery(hit(at=10.3)) == {}
    assert recovery(hit(at=11)) == {}


def test_a_kill_after_which_nothing_was_measured_is_told_with_how_many_it_hit() -> None:
    facts = Facts((good_task(events=taken(10.2, 10.5)),), (hit(at=11),))
    assert recovery_rows(judge(facts)) == [("horse", "0 of 1", "-", "-", "-")]


def test_of_two_kills_in_a_row_only_the_second_is_measured() -> None:
    assert recovery(hit(), hit("both", at=10.1)) == {"both": 0.4}


def test_a_time_in_which_the_server_was_away_is_not_a_workers_recovery() -> None:
    away = Hit("redis", 10.05, 1, "server", (), until=10.15)
    assert recovery(hit(), away) == {}


def test_a_death_of_the_server_is_measured_from_the_kill_and_from_its_return() -> None:
    assert recovery(hit("redis", until=10.1)) == {"redis": 0.5, SINCE_BACK: 0.4}


def test_quantiles_are_times_that_were_measured() -> None:
    tasks = [good_task(id=f"t{n}", events=taken(10.1, 10.0 + n / 100)) for n in range(11, 111)]
    hits = [Hit("horse", KILLED_AT, n, "worker-1", (task.id,)) for n, task in enumerate(tasks)]
    (spread,) = judge(Facts(tuple(tasks), tuple(hits))).recovery.values()
    assert (spread.number, spread.p50_s, spread.p99_s, spread.max_s) == (100, 0.6, 1.09, 1.1)


def outcome(**more: object) -> Outcome:
    task = good_task(effects=tuple(line | {"worker": 10} for line in good_task().effects))
    hits = (hit("stop", 1.2, until=1.8), hit("redis", 1.5, until=1.6), Hit("sweeper", 1.7, 5, "sweeper-1"), JOB)
    facts = facts_of(task, hits=hits, workers=((10, "worker-1"),), seconds=2.0, **more)
    return Outcome(judge(facts, judge(facts)), facts)


def test_the_report_has_a_page_for_people_lines_for_programs_and_a_picture(tmp_path: Path) -> None:
    written = write_report(tmp_path, outcome(), OPTIONS)
    assert [path.name for path in written] == ["report.md", "kills.jsonl", "tasks.jsonl", "timeline.png"]
    page, kills, tasks, picture = written
    assert "# Drill, seed 7: no guarantee broken" in page.read_text()
    assert "![tasks by worker over time](timeline.png)" in page.read_text()
    assert [json.loads(line)["kind"] for line in kills.read_text().splitlines()] == ["stop", "redis", "sweeper", "job"]
    (task,) = map(json.loads, tasks.read_text().splitlines())
    assert (task["task"], task["status"], task["runs"]) == (TASK, "succeeded", 2)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_report_says_so_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "ops.drill.picture", raising=False)
    written = write_report(tmp_path, outcome(), OPTIONS)
    assert "timeline.png" not in [path.name for path in written]
    assert NO_PLOT in written[0].read_text()


def test_what_broke_is_told_with_task_and_call(tmp_path: Path) -> None:
    facts = facts_of(good_task(effects=(*good_task().effects, effect("began"))))
    verdict = judge(facts)
    page = write_report(tmp_path, Outcome(verdict, facts), OPTIONS)[0].read_text()
    for text in (page, "\n".join(lines_of(verdict))):
        assert f"task {TASK}, call toolu_send: send ran 2 times" in text
        assert "roken: guarantee 1" in text


def test_a_drill_whose_run_without_kills_broke_something_says_that() -> None:
    """Then the kills are not to blame."""
    broken = judge(facts_of(good_task(status="running")))
    verdict = judge(facts_of(), broken)
    assert not verdict.holds
    assert "Broken even without kills" in lines_of(verdict)[-1]


def test_a_guarantee_that_nothing_was_held_against_is_not_told_as_kept() -> None:
    assert lines_of(judge(facts_of()))[-1] == "No guarantee broken. Not put to the test: guarantee 6, 7."


def test_the_matrix_is_written_for_people_and_for_programs(tmp_path: Path) -> None:
    task = good_task(effects=good_task().effects[:2])
    probe = Probe("send", {}, "side_effect", False)
    lines = [judge_line(label, probe, "horse", True, task) for label in ("after-claim", "after-effect")]
    write_matrix(tmp_path, lines)
    page = (tmp_path / "matrix.md").read_text()
    assert "after-claim" in page
    assert "NOT as expected: unknown → ran once, result unknown" in page
    assert len((tmp_path / "matrix.jsonl").read_text().splitlines()) == 2


def test_the_picture_has_a_bar_for_each_ownership_on_its_workers_row() -> None:
    task = good_task(events=taken(10.2, 10.5))
    facts = Facts((task,), owners=((TASK, 1, 11, "worker-1"), (TASK, 3, 12, "worker-2")))
    found = [(span.slot, span.start_s, span.end_s, span.end) for span in spans(facts, zero=9.0)]
    assert found == [("worker-1", 0.0, pytest.approx(1.2), "recovered"), ("worker-2", 1.5, 3.0, "ended")]


def test_the_command_line_that_is_told_gives_the_same_schedule_again() -> None:
    assert OPTIONS.command_line() == "baton drill --seed 7"
    other = Options(seed=7, tasks=8, kinds=("horse",), tools="my.tools", script=Path("a b.json"))
    assert other.command_line() == ("baton drill --seed 7 --tasks 8 --kill horse --tools my.tools --script 'a b.json'")
    assert Options(seed=7, sabotage="fence").command_line() == "baton drill --sabotage fence --seed 7"


def test_every_kind_of_kill_has_its_mark_in_the_picture() -> None:
    assert set(MARKS) == set(KINDS)
