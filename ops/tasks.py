"""`baton tasks` and `baton show`: read only."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from typing import Any

import click

from enqueue.command import print_json
from enqueue.plain import duration, plain
from ops.reach import reach
from ops.tables import print_fields, print_table
from worker.state.budget import Open
from worker.state.task import Status, Task, utc
from worker.state.views import LIST_MAX, Row

TEXT_SHOWN_MAX = 2_000


@click.command("tasks")
@click.option(
    "--status", "statuses", multiple=True, type=click.Choice([s.value for s in Status]), help="Only these; repeatable."
)
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, LIST_MAX), help="Most lines.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def tasks(statuses: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List tasks, newest first.

    Ended tasks are listed for as long as they are kept (BATON_RETENTION_S).
    """
    views = reach().views
    wanted = [Status(name) for name in statuses] or list(Status)
    indexes = list(dict.fromkeys(status.listed_in for status in wanted))
    # The index of ended tasks holds four statuses: look at as many as we may, then keep those that were asked for.
    rows = views.rows(indexes, LIST_MAX if statuses else limit)
    if statuses:
        rows = [row for row in rows if row.status in wanted][:limit]
    if as_json:
        print_json([_row_document(row) for row in rows])
        return
    now = views.now_ms()
    print_table(("ID", "STATUS", "AGE", "TURNS", "TEXT"), [_line(row, now) for row in rows], empty="no tasks")


@click.command("show")
@click.argument("id")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with the whole text and result.")
def show(id: str, as_json: bool) -> None:
    """Show task ID: what was asked, where it stands, its result."""
    reached = reach()
    task_id = reached.find(id)
    task = reached.views.task(task_id)
    progress = reached.views.progress(task_id)
    if as_json:
        print_json(document(task, progress))
    else:
        _print(task, progress, reached.views.now_ms())


def document(task: Task, progress: dict[str, Any]) -> dict[str, Any]:
    """The whole record as JSON; the frozen request is only named, it repeats what the workers offer."""
    record = {**asdict(task), "status": task.status.value, "request": task.request is not None}
    reserved = Open.load(record.pop("open_budget"))
    record["reserved_tokens"] = 0 if reserved is None else reserved.amount
    return {**record, "progress": progress}


def _row_document(row: Row) -> dict[str, Any]:
    score = row.score_ms if math.isfinite(row.score_ms) else None  # parked until a person decides; no JSON for that
    return {**asdict(row), "score_ms": score}


def _line(row: Row, now_ms: int) -> tuple[object, ...]:
    age = duration((now_ms - row.created_at_ms) / 1000)
    return row.task_id, row.status, age, row.turns, row.excerpt


def _print(task: Task, progress: dict[str, Any], now: int) -> None:
    def ago(ms: int | None) -> str | None:
        return None if ms is None else f"{duration((now - ms) / 1000)} ago"

    wakes = None if task.wake_at_ms is None else f"in {duration((task.wake_at_ms - now) / 1000)}"
    owner = task.owner if task.status is Status.RUNNING else {}
    pending = progress["pendingToolUse"]
    print_fields(
        {
            "task": task.task_id,
            "status": task.status.value,
            "reason": task.reason,
            "wakes": wakes if task.status is Status.PARKED else None,
            "deadline": None if task.deadline_ms is None else utc(task.deadline_ms),
            "concurrency": f"{task.concurrency} of {task.concurrency_key}" if task.concurrency_key else None,
            "runs on": f"{owner.get('host')}, process {owner.get('pid')}" if owner else None,
            "queue": task.queue,
            "created": ago(task.created_at_ms),
            "last change": ago(task.changed_at_ms),
            "model": task.model,
            "system": task.system,
            "tools": None if task.tools is None else ", ".join(task.tools) or "none",
            "tags": ", ".join(task.tags),
            "turns": f"{progress['turns'] or 0} of {task.turns_max}",
            "tokens": f"{progress['totalTokens'] or 0} of {task.tokens_max or 'no limit'}",
            "pending": ", ".join(_names(pending)) if pending else None,
            "attempts": task.attempts,
            "crashes": f"{task.crashes} ({task.crashes_in_row} in a row)" if task.crashes else None,
            "hand-overs": task.hand_overs or None,
            "abandoned calls": task.abandoned_calls or None,
            "parks": task.parks or None,
            "error": task.error,
        }
    )
    _section("text", task.text)
    _section("result", task.result)


def _names(pending: Any) -> list[str]:
    """Names of pending calls, as far as they can be made out."""
    calls = pending if isinstance(pending, list) else [pending]
    return [str(call.get("name", "?")) if isinstance(call, dict) else str(call) for call in calls]


def _section(title: str, text: str) -> None:
    if not text:
        return
    shown = plain(text[:TEXT_SHOWN_MAX])
    more = f"\n… {len(text) - TEXT_SHOWN_MAX} more characters (--json has all)" if len(text) > TEXT_SHOWN_MAX else ""
    click.echo(f"\n--- {title} ---\n{shown}{more}", file=sys.stdout)
