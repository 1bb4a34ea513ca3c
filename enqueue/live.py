"""Show a task's progress while it lasts: plain lines, and on a terminal a status line below them.

The answer goes to stdout; where the progress goes is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from enqueue.follow import follow
from enqueue.plain import plain
from enqueue.show import Narrator, clock_time
from worker.state.task import Status, Task
from worker.state.views import Event, Views

Say = Callable[[str], None]


def watch(views: Views, task_id: str, out: TextIO) -> Task:
    """Follow the task to its end with its progress on `out`; returns its record then."""
    narrator = Narrator()
    with _printer(out, task_id) as (say, status):

        def away(error: Exception) -> None:
            say("         Redis does not answer; waiting for it, the task is not lost")

        for event in follow(views, task_id, on_away=away):
            for line in narrator.lines(event):
                say(f"{clock_time(event.at_ms)} {line}")
            status(_now(event))
    return views.task(task_id)


def wait(views: Views, task_id: str) -> Task:
    """Follow the task to its end in silence."""
    for _ in follow(views, task_id):
        pass
    return views.task(task_id)


def print_answer(task: Task, out: TextIO) -> None:
    """The answer, byte for byte into a pipe or file; cleaned for a terminal, because it may be hostile."""
    text = plain(task.result) if out.isatty() else task.result
    if text:
        out.write(text if text.endswith("\n") else text + "\n")
    out.flush()


def exit_code(task: Task) -> int:
    return 0 if task.status is Status.SUCCEEDED else 1


@contextmanager
def _printer(out: TextIO, task_id: str) -> Iterator[tuple[Say, Say]]:
    """(print a line, set the status line)"""
    if not out.isatty():
        yield (lambda line: print(line, file=out, flush=True)), (lambda line: None)
        return
    from rich.console import Console  # 60 ms that only a terminal has to spend
    from rich.text import Text

    console = Console(file=out, markup=False, highlight=False, emoji=False)
    with console.status(Text(f"{task_id}: looking")) as shown:
        yield (
            (lambda line: console.print(Text(line), soft_wrap=True)),
            (lambda line: shown.update(Text(f"{task_id}: {line}"))),
        )


def _now(event: Event) -> str:
    """What the task is doing after this event."""
    match event.kind:
        case "created" | "woken" | "handed-over" | "recovered" | "redelivered" | "retried":
            return "queued; waits for a worker" if "delivery" in event.data else "waits for its time"
        case "claimed" | "answered":
            return "asking the model"
        case "responded" | "call-recorded":
            return "running tools" if event.data.get("calls", True) else "finishing"
        case "call-started":
            return f"running {plain(str(event.data.get('name', '')))[:64]}"
        case "parked":
            return "put aside"
        case kind:
            return plain(kind)[:64]
