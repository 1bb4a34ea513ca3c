"""`baton api`: what the API has told the fleet to wait for, and taking that back."""

from __future__ import annotations

from typing import Any

import click

from enqueue.command import print_json
from enqueue.plain import duration
from ops.reach import Reach, reach
from ops.tables import print_table
from worker.errors import InvalidInput
from worker.state.throttle import Closed, Throttle
from worker.throttle import WAITS_FOR, throttle_of


@click.group("api", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def api(context: click.Context, as_json: bool) -> None:
    """List the APIs that have told the fleet to wait: until when, why, and how many tasks are in line."""
    if context.invoked_subcommand is None:
        _list(_throttle(reach()), as_json=as_json)


@api.command("open")
@click.argument("host")
@click.option("--model", metavar="NAME", help="Only this model's.  [default: all of that host]")
def open_(host: str, model: str | None) -> None:
    """Ask HOST again at once, whatever it has said, and wake the tasks that wait for it.

    For a `retry-after` that nobody believes. If HOST means it, it says so again, and all wait again.
    """
    reached = reach()
    throttle = _throttle(reached)
    found = [one for one in throttle.closed()[1] if one.host == host and model in (None, one.model)]
    if not found:
        raise InvalidInput(f"nobody waits for {host}{f' and {model}' if model else ''}; `baton api` lists whom for")
    for one in found:
        throttle.forget(one.digest)
    woken = sum(reached.store.wake(task_id) for task_id in reached.views.waiting_for(WAITS_FOR))
    click.echo(f"{host}: asked again; {woken} waiting tasks go on")


def _throttle(reached: Reach) -> Throttle:
    return throttle_of(reached.store, reached.settings)


def _list(throttle: Throttle, *, as_json: bool) -> None:
    now, records = throttle.closed()
    if as_json:
        print_json([_document(one, now) for one in records])
        return
    rows = [(one.host, one.model, _wait(one, now), one.told, one.in_line(now)) for one in records]
    print_table(("API", "MODEL", "NOBODY ASKS FOR", "TOLD BY", "TASKS IN LINE"), rows, empty="nobody waits for an API")


def _wait(one: Closed, now_ms: int) -> str:
    left_s = (one.until_ms - now_ms) / 1000
    return duration(left_s) if left_s > 0 else "asks again, one after the other"


def _document(one: Closed, now_ms: int) -> dict[str, Any]:
    return {
        "host": one.host,
        "model": one.model,
        "untilMs": one.until_ms,
        "told": one.told,
        "inARow": one.streak,
        "tasksInLine": one.in_line(now_ms),
    }
