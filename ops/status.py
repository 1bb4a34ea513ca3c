"""`baton status`: is the fleet doing its work? And `baton version`."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from dataclasses import dataclass
from typing import Any

import click

from enqueue.command import print_json
from enqueue.plain import duration
from ops.reach import reach
from ops.tables import print_fields, print_table
from worker.settings import Settings
from worker.state.standing import text
from worker.state.store import Store
from worker.state.task import Status
from worker.state.throttle import Closed
from worker.state.views import Running, Views
from worker.throttle import throttle_of

ENDED_MAX = 100_000  # how many of the ended tasks are looked at, newest first
BATCH = 1_000
SHOWN_MAX = 20


@dataclass(frozen=True)
class Health:
    """What is counted. `counts`: tasks by status; `dead`: ids, newest first; `closed`: APIs that asked for a pause."""

    counts: dict[str, int]
    oldest_queued_s: float | None
    dead: list[str]
    running: list[Running]
    unseen: int
    closed: list[Closed]
    now_ms: int


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(as_json: bool) -> int:
    """Count tasks by status, show who runs what and which API asked for a pause, name the dead.

    Exit code 1 if there are dead tasks: given up after repeated crashes, they wait for a person (`baton show`,
    `baton retry`).
    """
    reached = reach()
    health = look(reached.views, reached.store, reached.settings)
    if as_json:
        print_json(_document(health))
    else:
        _print(health)
    return 1 if health.counts["dead"] else 0


@click.command("version")
def version() -> None:
    """Print the version."""
    click.echo(f"baton {importlib.metadata.version('baton-agents')}")


def look(views: Views, store: Store, settings: Settings) -> Health:
    """Reads the indexes, and the status of each ended task."""
    sizes = views.counts()
    counts = Counter({status.value: 0 for status in Status})
    counts.update({name: size for name, size in sizes.items() if name != "finished"})
    dead: list[str] = []
    for start in range(0, min(sizes["finished"], ENDED_MAX), BATCH):
        for task_id, ended in _ended(views, start):
            counts[ended] += 1
            if ended == Status.DEAD.value:
                dead.append(task_id)
    oldest = views.client.zrange(views.keys.index("queued"), 0, 0, withscores=True)
    now, closed = throttle_of(store, settings).closed()
    waits_s = max(0.0, (now - oldest[0][1]) / 1000) if oldest else None
    unseen = max(0, sizes["finished"] - ENDED_MAX)
    return Health(dict(counts), waits_s, dead, list(views.running()), unseen, closed, now)


def _ended(views: Views, start: int) -> list[tuple[str, str]]:
    """(task id, status) of one batch of ended tasks; those that expired or are not readable left out."""
    names = views.client.zrevrange(views.keys.index("finished"), start, start + BATCH - 1)
    ids = [text(name) for name in names]
    with views.client.pipeline(transaction=False) as pipe:
        for task_id in ids:
            pipe.hget(views.keys.task(task_id), "status")
        found = pipe.execute(raise_on_error=False)
    known = {status.value for status in Status if status.ended}
    return [
        (task_id, text(raw))
        for task_id, raw in zip(ids, found, strict=True)
        if isinstance(raw, bytes) and text(raw) in known
    ]


def _document(health: Health) -> dict[str, Any]:
    return {
        "counts": health.counts,
        "oldestQueuedS": health.oldest_queued_s,
        "dead": health.dead,
        "running": [
            {"id": task.task_id, "locked": task.locked, "deadlineMs": task.deadline_ms, "owner": task.owner}
            for task in health.running
        ],
        "endedNotLookedAt": health.unseen,
        "waitingForApi": [
            {"host": one.host, "model": one.model, "untilMs": one.until_ms, "rampOverMs": one.over_ms,
             "inLine": one.in_line(health.now_ms), "told": one.told, "streak": one.streak}
            for one in health.closed
        ],
    }  # fmt: skip


def _print(health: Health) -> None:
    fields: dict[str, object] = {name: str(count) for name, count in health.counts.items()}
    if health.oldest_queued_s is not None:
        fields["oldest queued"] = duration(health.oldest_queued_s)
    if health.unseen:
        fields["not looked at"] = f"{health.unseen} older ended tasks"
    print_fields(fields)
    if health.running:
        click.echo()
        rows = [_runner(task, health.now_ms) for task in health.running[:SHOWN_MAX]]
        print_table(("RUNNING", "HOST", "PROCESS", "LEASE"), rows, empty="")
    for one in health.closed[:SHOWN_MAX]:
        click.echo(_waiting(one, health.now_ms))
    for task_id in health.dead[:SHOWN_MAX]:
        click.echo(f"dead: {task_id}")
    if len(health.dead) > SHOWN_MAX:
        click.echo(f"… and {len(health.dead) - SHOWN_MAX} more: `baton tasks --status dead`")


def _waiting(one: Closed, now_ms: int) -> str:
    left_s = (one.until_ms - now_ms) / 1000
    until = f"waits for {duration(left_s)}" if left_s > 0 else "takes requests again, one after the other"
    return f"{one.host} {one.model}: {until}, {one.in_line(now_ms)} tasks in line, told by {one.told}"


def _runner(task: Running, now_ms: int) -> tuple[object, ...]:
    left_s = (task.deadline_ms - now_ms) / 1000
    lease = f"{duration(left_s)} left" if task.locked else f"ran out {duration(-left_s)} ago"
    return task.task_id, task.owner.get("host", "?"), task.owner.get("pid", "?"), lease
