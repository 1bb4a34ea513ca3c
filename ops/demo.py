"""`baton demo`: one task, one kill -9 in the middle, nothing done twice. Checks its own story; needs nothing.

Real parts throughout: an embedded Valkey, two stock `rq worker` processes, a sweeper, and the real anthropic client
against the scripted model. The worker that gets the task stops at the chosen crash point and is killed there from
outside, with its work-horse, by SIGKILL.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from enqueue.api import enqueue_task
from enqueue.plain import one_line, plain
from enqueue.show import Narrator
from ops import valkey
from ops.demo_script import NOTES, SCRIPT, TASK
from ops.demo_tools import EFFECTS, REPORT
from ops.demo_tools import NOTES as NOTES_FILE
from ops.scripted_model import ScriptedModel
from ops.transcript import check_log
from worker.crashpoints import POINTS
from worker.dispatch import open_store
from worker.errors import BatonError, InvalidInput
from worker.settings import Settings, load_settings
from worker.state.task import Status, Task
from worker.state.views import Event, Views

# Which passing of a point is the interesting one: that of write_report, the third call of the third turn.
PASSING = {"after-claim": 1, "after-start-mark": 1, "before-finish": 1}
WAIT_MAX_S = 60
NOTES_MAX_BYTES = 60_000


@click.command()
@click.option("--crash-at", default="after-effect-write", metavar="LABEL[:N]", help="Where to kill; see crash-points.")
@click.option("--notes", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Your own notes.")
@click.option("--dir", "home", type=click.Path(file_okay=False, path_type=Path), default=Path(".baton/demo"),
              show_default=True, help="Where report.txt and the logs are left.")  # fmt: skip
def demo(crash_at: str, notes: Path | None, home: Path) -> None:
    """Watch a task survive the death of its worker. Exit 0 only if everything it claims turned out true."""
    label, number = _crash_point(crash_at)
    home = _fresh(home)
    workspace = home / "workspace"
    (workspace / NOTES_FILE).write_text(_read(notes) if notes else NOTES, encoding="utf-8")
    story = Story(Console(highlight=False))
    with ExitStack() as stack:
        server = stack.enter_context(valkey.ensure(home / "valkey"))
        model = stack.enter_context(ScriptedModel(SCRIPT, log=home / "requests.jsonl"))
        settings = load_settings({}, redis_url=server.url, workspace=workspace, tools="ops.demo_tools")
        story.tell("valkey", f"embedded, every write on disk before it is acknowledged (pid {server.pid})")
        story.tell("model", "scripted, spoken to by the real client over HTTP: no key, no cost")
        fleet = Fleet(stack, settings, model.url, home, f"{label}:{number}")
        fleet.start("sweeper", "baton", "sweep")
        for name in ("worker-1", "worker-2"):
            fleet.start(name, "rq", "worker", settings.queue, "-u", server.url)
            story.tell(name, f"rq worker {settings.queue} (stock, pid {fleet.processes[name].pid})")
        task = enqueue_task(TASK, settings=settings)
        story.tell("client", f'enqueue-task "{TASK}" → {task.id}')
        views = Views(open_store(settings).client, open_store(settings).keys)
        events = story.follow(views, task.id, fleet)
        ended = views.task(task.id)
    Verdict(story, home, label).give(ended, events, fleet)


class Story:
    """Prints what happens, with the seconds since the beginning."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.began = time.monotonic()

    def tell(self, who: str, what: str, style: str = "") -> None:
        line = Text(f"{time.monotonic() - self.began:6.2f}s  ")
        line.append(f"{who:<9} ", style="bold cyan").append(one_line(what, 200), style=style)
        self.console.print(line, soft_wrap=True)

    def follow(self, views: Views, task_id: str, fleet: Fleet) -> list[Event]:
        """Tell the task's events until it has ended, and kill its worker on the way."""
        narrator, seen, cursor = Narrator(), list[Event](), "0"
        while time.monotonic() - self.began < WAIT_MAX_S:
            for event in views.events(task_id, cursor, block_ms=100):
                cursor = event.cursor
                seen.append(event)
                for line in narrator.lines(event):
                    bright = "bold green" if "not run again" in line or event.kind == "ended" else ""
                    self.tell("task", line, "bold red" if event.kind == "recovered" else bright)
            if killed := fleet.kill_the_one_at_its_point():
                self.tell("kill -9", killed, "bold red")
            if seen and seen[-1].kind == "ended":
                return seen
        raise BatonError(f"the task did not end within {WAIT_MAX_S} s; the logs are in {fleet.home}")


class Fleet:
    """The demo's own processes; all of them end with it."""

    def __init__(self, stack: ExitStack, settings: Settings, model_url: str, home: Path, crash_after: str) -> None:
        self.home = home
        self.stack = stack
        self.victim = home / "victim"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.killed: str | None = None
        self.environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("BATON_", "ANTHROPIC_", "RQ_"))},
            "BATON_REDIS_URL": settings.redis_url,
            "BATON_WORKSPACE": str(settings.workspace),
            "BATON_TOOLS": settings.tools,
            "BATON_SWEEP_PERIOD_S": "0.2",
            "ANTHROPIC_BASE_URL": model_url,
            "ANTHROPIC_API_KEY": "scripted",
            "NO_PROXY": "127.0.0.1",
            "CRASH_AFTER": crash_after,
            "CRASH_ONCE": str(self.victim),
            "CRASH_WAIT": "1",
        }

    def start(self, name: str, command: str, *args: str) -> None:
        program = Path(sys.executable).with_name(command)
        log = self.stack.enter_context((self.home / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            [program, *args], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environ, start_new_session=True
        )
        self.processes[name] = process
        self.stack.enter_context(_ended(process))

    def kill_the_one_at_its_point(self) -> str | None:
        """SIGKILL the worker, and its work-horse, that has recorded that it reached the crash point."""
        if self.killed or not self.victim.exists():
            return None
        horse, parent = map(int, self.victim.read_text().split())
        name = next(name for name, process in self.processes.items() if process.pid == parent)
        os.kill(parent, signal.SIGKILL)
        os.kill(horse, signal.SIGKILL)
        self.processes[name].wait()
        point = self.environ["CRASH_AFTER"].partition(":")[0]
        self.killed = f"{name} (pid {parent}) and its work-horse (pid {horse}), {point}: {POINTS[point]}"
        return self.killed


class Verdict:
    """Looks at the world, not at what the task says of itself."""

    def __init__(self, story: Story, home: Path, label: str) -> None:
        self.story = story
        self.home = home
        self.label = label

    def give(self, task: Task, events: list[Event], fleet: Fleet) -> None:
        report = self.home / "workspace" / REPORT
        runs = (self.home / "workspace" / EFFECTS).read_text().splitlines() if report.exists() else []
        bodies = [json.loads(line)["body"] for line in (self.home / "requests.jsonl").read_text().splitlines()]
        recovered = [event for event in events if event.kind == "recovered"]
        claims = {
            "the worker was killed at the chosen moment": fleet.killed is not None,
            "another worker took the task over": len(recovered) == 1 and task.attempts == 2,
            f"the task ended by itself: {task.status}": task.status is Status.SUCCEEDED,
            f"write_report took effect once: {len(runs)} line in effects.log": len(runs) == 1,
            "every request to the model was valid, and each continued the one before": not check_log(bodies),
        }
        if self.label == "after-effect-write":
            decided = [data for event in events for data in event.data.get("decisions", {}).values()]
            claims["the recorded result was reused, the call was not run again"] = "reuse" in decided
        self.story.console.print()
        if report.exists():
            text = Text(plain(report.read_text(encoding="utf-8").rstrip()[:4000]))
            self.story.console.print(Panel(text, title=str(report), title_align="left", expand=False))
        for claim, holds in claims.items():
            mark = Text("  ✓ " if holds else "  ✗ ", style="bold green" if holds else "bold red")
            self.story.console.print(mark.append(claim, style=""), soft_wrap=True)
        if not all(claims.values()):
            raise BatonError(f"the demo did not go as told; its logs are in {self.home}")
        self.story.console.print(f"\nAnother moment: baton demo --crash-at LABEL, one of {', '.join(POINTS)}")


def _crash_point(value: str) -> tuple[str, int]:
    label, _, number = value.partition(":")
    if label not in POINTS or not (number or "1").isdigit() or int(number or "1") < 1:
        raise InvalidInput(f"--crash-at {value}: expected LABEL or LABEL:N with one of {', '.join(POINTS)}")
    return label, int(number) if number else PASSING.get(label, 3)


def _read(notes: Path) -> str:
    raw = notes.read_bytes()
    if not raw.strip():
        raise InvalidInput(f"{notes} is empty: there is nothing to make a report of")
    if len(raw) > NOTES_MAX_BYTES:
        raise InvalidInput(f"{notes} has {len(raw)} bytes; the demo takes {NOTES_MAX_BYTES}")
    return raw.decode("utf-8", "replace")


def _fresh(home: Path) -> Path:
    """An empty directory for this run; clears away only what an earlier demo left there."""
    home = home.resolve()
    if home.exists() and any(home.iterdir()) and not (home / "requests.jsonl").exists():
        raise InvalidInput(f"{home} holds something that is not a demo's; name another with --dir")
    shutil.rmtree(home, ignore_errors=True)
    (home / "workspace").mkdir(parents=True)
    (home / "requests.jsonl").touch()
    return home


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the process and its work-horse with the block. They are in a session of their own."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
