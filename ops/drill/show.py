"""What is seen while a drill goes on: a live table on a terminal, plain lines elsewhere, nothing with --json."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ops.drill.facts import Hit

LINE_EVERY_S = 5.0
HITS_SHOWN = 8


@dataclass(frozen=True)
class State:
    """One moment of a run."""

    phase: str
    at_s: float
    tasks: int
    accepted: int
    alive: int
    running: int
    queued: int
    done: int
    recovered: int
    kills: tuple[str, ...]
    server_is_up: bool


class Show(Protocol):
    """Where a drill shows itself."""

    def say(self, what: str) -> None: ...
    def state(self, state: State) -> None: ...
    def hit(self, hit: Hit, at_s: float) -> None: ...
    def __enter__(self) -> Show: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Silent:
    """Shows nothing."""

    def say(self, what: str) -> None: ...

    def state(self, state: State) -> None: ...

    def hit(self, hit: Hit, at_s: float) -> None: ...

    def __enter__(self) -> Show:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lines(Silent):
    """A line for each kill, and one every few seconds."""

    def __init__(self) -> None:
        self._next = 0.0
        self._phase = ""

    def say(self, what: str) -> None:
        click.echo(what)

    def state(self, state: State) -> None:
        if state.phase != self._phase:
            self._phase, self._next = state.phase, LINE_EVERY_S
        if state.at_s < self._next:
            return
        self._next = state.at_s + LINE_EVERY_S
        away = "" if state.server_is_up else ", the server is away"
        click.echo(
            f"{state.at_s:6.1f}s  {state.alive} workers, {state.running} running, {state.queued} queued, "
            f"{state.done} of {state.tasks} done, {state.recovered} recovered{away}"
        )

    def hit(self, hit: Hit, at_s: float) -> None:
        click.echo(f"{at_s:6.1f}s  {in_words(hit)}")


class Drawn(Silent):
    """Drawn again and again in one place, the last kills under it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._hits: list[Text] = []
        self._phase = ""

    def say(self, what: str) -> None:
        self._live.console.print(Text(what))

    def state(self, state: State) -> None:
        if state.phase != self._phase:
            self._phase, self._hits = state.phase, []
        self._live.update(Group(_table(state), *self._hits[-HITS_SHOWN:]))

    def hit(self, hit: Hit, at_s: float) -> None:
        self._hits.append(Text(f"{at_s:6.1f}s  ").append(in_words(hit), style="red"))

    def __enter__(self) -> Show:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def show_for(console: Console, *, silent: bool) -> Show:
    if silent:
        return Silent()
    return Drawn(console) if console.is_terminal else Lines()


def in_words(hit: Hit) -> str:
    """A kill in a line."""
    if hit.kind == "job":
        return hit.slot
    tasks = f", running {', '.join(hit.tasks)}" if hit.tasks else ""
    number = {"stop": "SIGSTOP", "term": "SIGTERM"}.get(hit.kind, "SIGKILL")
    return f"{number} {hit.kind}: {hit.slot}, pid {hit.pid}{tasks}"


def _table(state: State) -> Table:
    table = Table.grid(padding=(0, 2))
    kills = Counter(state.kills)
    killed = ", ".join(f"{number} {kind}" for kind, number in kills.most_common()) or "none"
    server = Text("up", style="green") if state.server_is_up else Text("killed", style="bold red")
    for name, value in (
        ("phase", Text(f"{state.phase}, {state.at_s:.1f} s")),
        ("server", server),
        ("alive", Text(f"{state.alive} workers")),
        ("killed", Text(f"{len(state.kills)} ({killed})", style="red" if kills else "")),
        ("running", Text(f"{state.running}, {state.queued} queued")),
        ("recovered", Text(str(state.recovered), style="yellow" if state.recovered else "")),
    ):
        table.add_row(Text(name, style="cyan"), value)
    bar = ProgressBar(total=state.tasks, completed=state.done, width=40)
    done = Table.grid(padding=(0, 2))
    done.add_row(bar, Text(f"{state.done} of {state.tasks}"))
    table.add_row(Text("done", style="cyan"), done)
    return table
