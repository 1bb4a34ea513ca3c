"""`--report`: what a drill found, to keep and to send around.

report.md for people; kills.jsonl and tasks.jsonl, a line each, for programs; timeline.png, tasks by worker over time,
where matplotlib is installed.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ops.drill.conversation import results_given
from ops.drill.facts import Facts, Json, TaskFacts
from ops.drill.hold import Options, Outcome
from ops.drill.matrix_table import Line
from ops.drill.plan import ABOUT
from ops.drill.words import (
    GUARANTEE_HEADINGS,
    RECOVERY_HEADINGS,
    Rows,
    count_rows,
    ends_line,
    examples,
    guarantee_rows,
    last_line,
    markdown_table,
    overhead_line,
    recovery_rows,
)

MATRIX_HEADINGS = ("died at", "tool", "who died", "became of the call", "")
NO_PLOT = "No picture: matplotlib is not installed (`pip install 'baton-agents[drill]'`)."


def write_report(directory: Path, outcome: Outcome, options: Options) -> list[Path]:
    """The files written. Raises OSError."""
    facts = outcome.facts
    zero = first_moment(facts)
    written = [_lines(directory / "kills.jsonl", kill_lines(facts, zero))]
    written.append(_lines(directory / "tasks.jsonl", map(task_line, facts.tasks)))
    picture = _picture(directory / "timeline.png", facts, zero)
    report = directory / "report.md"
    report.write_text("\n".join(report_lines(outcome, options, picture)) + "\n", encoding="utf-8")
    return [report, *written, *([picture] if picture else [])]


def write_matrix(directory: Path, lines: Sequence[Line]) -> None:
    """matrix.md for people, matrix.jsonl for programs. Raises OSError."""
    wrong = sum(not line.ok for line in lines)
    rows = [
        (line.label, f"{line.probe.tool} ({line.probe.nature})", line.death, str(line.got), _mark(line))
        for line in lines
    ]
    page = [f"# {len(lines)} deaths, {wrong} not as expected", "", *markdown_table(MATRIX_HEADINGS, rows)]
    (directory / "matrix.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    _lines(directory / "matrix.jsonl", (line.document() for line in lines))


def _mark(line: Line) -> str:
    if not line.ok:
        return f"NOT as expected: {line.expected}"
    return "ok" if line.died else "ok (nobody passes this point)"


def report_lines(outcome: Outcome, options: Options, picture: Path | None) -> list[str]:
    """The Markdown."""
    verdict = outcome.verdict
    lines = [
        f"# Drill, seed {options.seed}: {last_line(verdict).rstrip('.').lower()}",
        "",
        f"{ends_line(verdict)}. {overhead_line(verdict)}",
        "",
        *markdown_table(GUARANTEE_HEADINGS, guarantee_rows(verdict)),
        "",
    ]
    if broken := examples(verdict):
        lines += ["## What broke", "", *(f"- {line}" for line in broken), ""]
    lines += [f"![tasks by worker over time]({picture.name})" if picture else NO_PLOT, ""]
    lines += ["## Counts", "", *markdown_table(("", "times", ""), count_rows(verdict)), ""]
    if verdict.recovery:
        rows = recovery_rows(verdict)
        lines += ["## From the kill to the next claim of the task", "", *markdown_table(RECOVERY_HEADINGS, rows), ""]
    return [*lines, "## How it was held", "", *markdown_table(("", ""), _how(options))]


def first_moment(facts: Facts) -> float:
    """When the first task was accepted, in seconds since 1970."""
    times = [task.events[0].at_ms / 1000 for task in facts.tasks if task.events]
    return min(times, default=0.0)


def kill_lines(facts: Facts, zero: float) -> Iterable[Json]:
    for hit in facts.hits:
        until = None if hit.until is None else round(hit.until - zero, 3)
        times = {"dueSeconds": hit.due_s, "seconds": round(hit.at - zero, 3), "untilSeconds": until}
        yield {**times, "kind": hit.kind, "slot": hit.slot, "pid": hit.pid, "tasks": list(hit.tasks)}


def task_line(task: TaskFacts) -> Json:
    decided: Json = {}
    for event in task.events:
        if event.kind == "answered":
            decided |= {f"{event.data['turn']}:{call}": what for call, what in event.data.get("decisions", {}).items()}
    return {
        "task": task.id,
        "status": task.status or "lost",
        "reason": task.reason,
        "turns": task.turns,
        "attempts": task.attempts,
        "crashes": task.crashes,
        "requests": len(task.requests),
        "runs": sum(line["what"] == "began" for line in task.effects),
        "unknown": sum(result.is_unknown for result in results_given(task)),
        "decisions": {call: what for call, what in decided.items() if what != "run"},
    }


def _how(options: Options) -> Rows:
    tools = options.tools or "the drill's own: read_only, idempotent, side_effect, side_effect with verify"
    return [
        ("again", f"`{options.command_line()}`"),
        ("tasks", f"{options.tasks}" + (f", of {options.turns} turns each" if not options.script else "")),
        ("workers", str(options.workers)),
        ("kills", f"for {options.seconds:g} s"),
        *((kind, ABOUT[kind]) for kind in options.kinds),
        ("lease", f"{options.lease_ms} ms"),
        ("tools", tools),
        (
            "versions",
            f"baton-agents {version('baton-agents')}, Python {platform.python_version()}, {platform.system()}",
        ),
    ]


def _lines(path: Path, lines: Iterable[Json]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _picture(path: Path, facts: Facts, zero: float) -> Path | None:
    try:
        from ops.drill.picture import draw
    except ImportError:
        return None
    figure: Any = draw(facts, zero)
    figure.savefig(path, dpi=130)
    return path
