"""`baton follow`, `cancel` and `retry`: one task, by its id."""

from __future__ import annotations

import getpass
import sys
from typing import Literal

import click

from enqueue.cli import seconds
from enqueue.live import exit_code, print_answer, watch
from enqueue.request import deadline_ms
from enqueue.trouble import our_words
from ops.reach import reach
from worker.errors import InvalidInput, RedisUnavailable, WrongState
from worker.state.ledger import Resolution
from worker.state.task import Status


@click.command("follow")
@click.argument("id")
def follow(id: str) -> int:
    """Watch task ID until it ends, then print its answer.

    Exit code 0 if it succeeded, 1 if not. Ctrl-C stops the watching, not the task.
    """
    reached = reach()
    task_id = reached.find(id)
    try:
        with our_words(reached.settings.redis_url):
            task = watch(reached.views, task_id, sys.stdout)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; task {task_id} goes on (`baton cancel {task_id}` ends it)") from None
    except RedisUnavailable as error:
        raise RedisUnavailable(f"{error}; task {task_id} goes on when Redis is back") from error
    if task.result:
        click.echo()
    print_answer(task, sys.stdout)
    return exit_code(task)


@click.command("cancel")
@click.argument("id")
@click.option("--by", metavar="NAME", help="Who wants it.  [default: your user name]")
def cancel(id: str, by: str | None) -> None:
    """End task ID: at once if nobody runs it, else at its next step."""
    reached = reach()
    task_id = reached.find(id)
    status = reached.store.cancel(task_id, by or user())
    match status:
        case Status.RUNNING:
            click.echo(f"{task_id}: asked to stop; its worker stops at the next step")
        case Status.CANCELLED:
            click.echo(f"{task_id}: was cancelled before")
        case _:
            click.echo(f"{task_id}: cancelled; it was {status.value}")


@click.command("retry")
@click.argument("id")
@click.option("--max-turns", type=click.IntRange(1, 100_000), metavar="N", help="Allow it N turns in all.")
@click.option("--max-tokens-total", type=click.IntRange(1), metavar="N", help="Allow it N tokens in all.")
@click.option("--deadline", callback=seconds, metavar="TIME", help="Give it so long from now: 90, 90s, 5m, 2h, 1d.")
def retry(id: str, max_turns: int | None, max_tokens_total: int | None, deadline: float | None) -> None:
    """Queue task ID again: a failed, dead or cancelled one from where it stopped, a parked one now.

    A task that reached a limit reaches it again at once, unless it is allowed more.
    """
    reached = reach()
    task_id = reached.find(id)
    parked = reached.views.status(task_id) is Status.PARKED
    if parked:
        if (max_turns, max_tokens_total, deadline) != (None, None, None):
            raise click.UsageError("limits are for tasks that ended; this one is parked and is woken as it is")
        if not reached.store.wake(task_id):
            raise WrongState(task_id, reached.views.status(task_id).value, "woken")
        click.echo(f"{task_id}: woken and queued")
        return
    given_ms = None if deadline is None else deadline_ms(deadline)
    limits: dict[str, int | None] = {"turns_max": max_turns, "tokens_max": max_tokens_total, "deadline_ms": given_ms}
    delivery = reached.store.retry(task_id, user(), **limits)
    click.echo(f"{task_id}: queued again (delivery {delivery})")


@click.command("resolve")
@click.argument("id")
@click.argument("call", required=False)
@click.option("--happened", metavar="RESULT", help="It took effect; RESULT is what the model is told it returned.")
@click.option("--not-happened", is_flag=True, help="It did not take effect, and is run now.")
@click.option("--report", is_flag=True, help="Nobody knows; the model is told so.")
def resolve(id: str, call: str | None, happened: str | None, not_happened: bool, report: bool) -> None:
    """Say what became of a call that holds task ID, which then goes on.

    CALL is the call's id, or a beginning of it; it can be left out if only one call is pending.
    """
    if [happened is not None, not_happened, report].count(True) != 1:
        raise click.UsageError("say one of --happened RESULT, --not-happened, --report")
    if happened is not None and (not happened.strip() or not happened.isprintable()):
        raise click.UsageError("RESULT must be a line of text, and not blank")
    reached = reach()
    task_id = reached.find(id)
    progress = reached.views.progress(task_id)
    pending = [one["id"] for one in progress["pendingToolUse"] or [] if one["id"].startswith(call or "")]
    if len(pending) != 1:
        raise InvalidInput(f"task {task_id} has {len(pending)} pending calls like that: {', '.join(pending) or 'none'}")
    outcome: Literal["happened", "not_happened", "report"] = "not_happened" if not_happened else "report"
    resolution = Resolution("happened" if happened is not None else outcome, happened or "")
    reached.store.resolve(task_id, progress["turns"], pending[0], resolution, user())
    click.echo(f"{task_id}: {pending[0]} resolved ({resolution.outcome.replace('_', ' ')}); queued again")


def user() -> str:
    """Who gives the command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "the command line"
