"""`enqueue-task "…"`: hand a task to the fleet.

stdout holds what a script wants and nothing else: the task's id, or with --wait and --follow its answer, or with
--json one document, errors included. Everything for people goes to stderr. Exit code 0 means accepted; with --wait
and --follow, succeeded.

Only click is imported up here, so that `--help` and wrong use answer at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from enqueue.command import FAILED, forget_stdout, note, print_json, run_command
from enqueue.ids import checked_id, new_id
from enqueue.text import TextCommand, text_from
from worker.errors import BatonError, RedisUnavailable

if TYPE_CHECKING:
    from enqueue.api import TaskHandle
    from worker.settings import Settings
    from worker.state.task import Task

NAME = "enqueue-task"

EPILOG = """\b
Exit codes:
  0    accepted; with --wait or --follow: it succeeded
  1    with --wait or --follow: it ended as failed, dead or cancelled
  2    wrong use, wrong input or wrong settings; nothing was enqueued
  3    Redis is away or refuses; stderr says whether anything was enqueued
  4    the task id is taken by another request; nothing was enqueued
  130  interrupted; a task that was accepted goes on

\b
Text that begins with a dash:  enqueue-task -- "--help is what it is about"
Long text (up to 10 MB):       enqueue-task --file notes.txt
                               cat notes.txt | enqueue-task -
"""


_UNITS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}


def seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Callback of an option that takes a time; None where it was not given."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([smhd]?)", value, re.ASCII)
    if not found:
        raise click.BadParameter(f"{value!a} is no time: write seconds, or 90s, 5m, 2h, 1d", ctx, param)
    return float(found[1]) * _UNITS[found[2]]


@click.command(cls=TextCommand, epilog=EPILOG)
@click.argument("text", nargs=-1, metavar="TEXT")
@click.option("--file", "file", metavar="FILE", help="Read the text from FILE, byte for byte.")
@click.option("--stdin", "from_stdin", is_flag=True, hidden=True)
@click.option("--follow", is_flag=True, help="Show the progress (stderr), then print the answer instead of the id.")
@click.option("--wait", is_flag=True, help="Wait for the end, then print the answer instead of the id.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for errors too.")
@click.option("--task-id", metavar="ID", help="The id to give it: enqueuing it again then makes no second task.")
@click.option(
    "--dedupe-key", metavar="KEY", help="If a task with this KEY waits, runs or has succeeded, take that one."
)
@click.option("--queue", metavar="NAME", help="RQ queue.  [default: BATON_QUEUE, agents]")
@click.option("--model", metavar="NAME", help="Model.  [default: BATON_MODEL]")
@click.option("--system", metavar="PROMPT", help="System prompt.  [default: BATON_SYSTEM]")
@click.option("--max-turns", type=int, metavar="N", help="Most model responses.  [default: BATON_TURNS_MAX, 40]")
@click.option("--max-tokens-total", type=int, metavar="N", help="Most tokens in all.  [default: no limit]")
@click.option("--tools", metavar="A,B", help="Only these tools; '' for none.  [default: all the workers have]")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="A word to find it by; may be repeated.")
@click.option("--delay", callback=seconds, default="0", metavar="TIME", help="Start later: 90, 90s, 5m, 2h, 1d.")
@click.option("--deadline", callback=seconds, metavar="TIME", help="Fail if not done by then: 90, 90s, 5m, 2h, 1d.")
@click.option(
    "--concurrency-key", metavar="KEY", help="With --concurrency N: at most N tasks with this KEY run at once."
)
@click.option("--concurrency", type=int, metavar="N", help="See --concurrency-key.")
@click.version_option(package_name="baton-agents", prog_name=NAME, message="%(prog)s %(version)s")
def cli(
    text: tuple[str, ...], file: str | None, from_stdin: bool, follow: bool, wait: bool, as_json: bool,
    tools: str | None, tags: tuple[str, ...], **options: Any,
) -> int:  # fmt: skip
    """Hand the task TEXT to the fleet of workers and print its id.

    TEXT is one argument; - reads it from standard input.
    """
    from worker.settings import load_settings

    settings = load_settings()
    content = text_from(text, file, from_stdin, settings.text_max_bytes)
    task_id = new_id() if options["task_id"] is None else checked_id(options["task_id"])
    request = {
        "task_id": task_id,
        "dedupe_key": options["dedupe_key"],
        "queue": options["queue"],
        "model": options["model"],
        "system": options["system"],
        "turns_max": options["max_turns"],
        "tokens_max": options["max_tokens_total"],
        "tools": None if tools is None else [name.strip() for name in tools.split(",") if name.strip()],
        "tags": tags,
        "delay_s": options["delay"],
        "deadline_s": options["deadline"],
        "concurrency_key": options["concurrency_key"],
        "concurrency": options["concurrency"],
    }
    handle = _enqueue(content, request, settings)
    status = _status(handle, options["delay"])
    if handle.existed:
        note(NAME, f"task {handle.id} was accepted before and is {status} now; nothing was enqueued")
    if follow or wait:
        return _stay(handle, follow=follow, as_json=as_json)
    if as_json:
        document = {"id": handle.id, "existed": handle.existed, "status": status}
        return _print(handle, lambda: print_json(document))
    return _print(handle, lambda: click.echo(handle.id))


def main() -> None:
    """The console script."""
    sys.exit(run_command(cli, NAME))


def _enqueue(text: str, request: dict[str, Any], settings: Settings) -> TaskHandle:
    from enqueue.api import enqueue_task

    try:
        return enqueue_task(text, settings=settings, **request)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted while enqueuing; to be sure, repeat it with --task-id {request['task_id']}"
        ) from None


def _status(handle: TaskHandle, delay_s: float) -> str:
    """For people only: that this cannot be read any more does not make the task less accepted."""
    if not handle.existed:
        return "parked" if delay_s else "queued"
    try:
        return handle.status().value
    except BatonError:
        return "unknown"


def _stay(handle: TaskHandle, *, follow: bool, as_json: bool) -> int:
    """Until the task has ended; the exit code says how."""
    from enqueue.live import exit_code, print_answer, wait, watch
    from enqueue.show import ending
    from enqueue.trouble import our_words

    try:
        note(NAME, f"task {handle.id}")
        with our_words(handle.url):
            task = watch(handle.views, handle.id, sys.stderr) if follow else wait(handle.views, handle.id)
            progress = handle.views.progress(handle.id)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_goes_on(handle, "interrupted")) from None
    except RedisUnavailable as error:
        raise RedisUnavailable(_goes_on(handle, str(error))) from error
    code = exit_code(task)
    if as_json:
        document = {**_ended(task, progress), "existed": handle.existed, "exitCode": code}
        return _print(handle, lambda: print_json(document), code)
    if code and not follow:
        note(NAME, f"task {ending(task.status.value, task.reason)}")
    return _print(handle, lambda: print_answer(task, sys.stdout), code)


def _ended(task: Task, progress: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": task.task_id,
        "status": task.status.value,
        "reason": task.reason,
        "result": task.result,
        "error": task.error,
        "turns": progress["turns"],
        "totalTokens": progress["totalTokens"],
    }


def _goes_on(handle: TaskHandle, what: str) -> str:
    return f"{what}: task {handle.id} was accepted and goes on; `baton follow {handle.id}` shows it"


def _print(handle: TaskHandle, output: Callable[[], None], code: int = 0) -> int:
    """Print what was asked for. That nobody can read it does not make the task less accepted."""
    try:
        output()
    except BrokenPipeError:
        note(NAME, f"task {handle.id} was accepted, and nobody reads stdout")
        forget_stdout()
    except OSError as error:
        note(NAME, f"task {handle.id} was accepted, but stdout cannot be written: {error.strerror}")
        forget_stdout()
        return FAILED
    return code


if __name__ == "__main__":
    main()
