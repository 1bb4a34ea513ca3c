"""`baton bench`: measure, print a table, write JSON."""

from __future__ import annotations

import cProfile
import json
import pstats
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ops.bench import enqueuing, memory, rates, starts, sweeping, takeovers, turns
from ops.bench.place import Place, machine
from ops.bench.rows import Row, skipped
from ops.bench.size import Size
from worker.sweeper import make_sweeper

PROFILE_LINES = 25


@dataclass(frozen=True)
class Item:
    """`measure` gives its rows; `profiled` does in this process what its time goes into."""

    about: str
    measure: Callable[[Place, Size], list[Row]]
    profiled: Callable[[Place], object] | None = None


def _profiled_sweep(place: Place) -> None:
    sweeping.build_idle(place, 100_000)
    make_sweeper(place.settings).sweep_once()


ITEMS = {
    "turns": Item("durable overhead per turn", turns.measure, lambda place: turns.one_long_task(place, 300)),
    "tasks": Item("one-turn tasks per second", rates.measure, lambda place: turns.one_turn_tasks(place, 200)),
    "five": Item("five-turn tasks per second", rates.measure_five),
    "enqueue": Item("tasks accepted per second", enqueuing.measure, lambda place: enqueuing.at_once(place, 1000)),
    "start": Item("push to first request", starts.measure),
    "memory": Item("memory per waiting task", memory.measure),
    "sweep": Item("one sweep over 100 000 tasks", sweeping.measure, _profiled_sweep),
    "takeover": Item("takeover after kill -9", takeovers.measure),
}


@click.command("bench")
@click.option("--quick", "size", flag_value="quick", help="Fewer rounds: under 3 minutes in all.")
@click.option("--tiny", "size", flag_value="tiny", hidden=True)
@click.option(
    "--only", multiple=True, type=click.Choice(list(ITEMS)), metavar="NAME", help="Only this; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@click.option("--out", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Write the JSON there too.")
@click.option("--profile", is_flag=True, help="Print a profile of what can be run in this process, to stderr.")
def bench(size: str | None, only: tuple[str, ...], as_json: bool, out: Path | None, profile: bool) -> None:
    """Measure what Baton costs on this machine, each number beside its floor in the same run.

    Starts a server and workers of its own, and ends them. Names: turns, tasks, five, enqueue, start, memory, sweep,
    takeover.
    """
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    try:
        found = run(only or tuple(ITEMS), Size(size or "full"), profile=profile)  # type: ignore[arg-type]  # one of three
    finally:
        signal.signal(signal.SIGTERM, former)
    if out is not None:
        out.write_text(json.dumps(found, indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show(found)


def run(names: tuple[str, ...], size: Size, *, profile: bool = False) -> dict[str, Any]:
    """The JSON document: {size, machine, seconds, rows}. An item that fails is a row that says so."""
    began = time.monotonic()
    rows: list[Row] = []
    with Place() as place:
        about = machine(place.home)
        for name in names:
            rows += _measured(place, name, size)
            if profile and ITEMS[name].profiled:
                _profile(place, name)
    documents = [row.document() for row in rows]
    return {"size": size.name, "machine": about, "seconds": round(time.monotonic() - began, 1), "rows": documents}


def _measured(place: Place, name: str, size: Size) -> list[Row]:
    start = time.monotonic()
    click.echo(f"bench: {name}: {ITEMS[name].about} …", err=True)
    try:
        rows = ITEMS[name].measure(place, size)
    except (RuntimeError, TimeoutError) as error:  # the other items may still be measured
        rows = [skipped(ITEMS[name].about, str(error))]
    place.stop_workers()
    place.empty()
    click.echo(f"bench: {name}: {time.monotonic() - start:.1f} s", err=True)
    return rows


def _profile(place: Place, name: str) -> None:
    act = ITEMS[name].profiled
    assert act is not None
    with cProfile.Profile() as profile:
        act(place)
    place.empty()
    click.echo(f"bench: profile of {name}", err=True)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(PROFILE_LINES)


def show(found: Mapping[str, Any]) -> None:
    """The document as a table, notes below it."""
    about = found["machine"]
    table = Table("measured", title=f"baton bench ({found['size']})", title_justify="left", box=None, pad_edge=False)
    for heading in ("ours", "floor", "ratio", "bar", "", "note"):
        table.add_column(heading, justify="right", no_wrap=True)
    notes: dict[str, int] = {}
    for row in found["rows"]:
        verdict = {None: "", True: "ok", False: "MISSED"}[row["ok"]]
        unit, ratio = row["unit"], row["ratio"]
        numbers = [_number(row["ours"], unit), _number(row["floor"], unit), "" if ratio is None else f"{ratio:.2f}x"]
        mark = str(notes.setdefault(row["note"], len(notes) + 1)) if row["note"] else ""
        table.add_row(row["name"], *numbers, row["bar"] or "", verdict, mark)
    console = Console(markup=False, highlight=False)
    console.print(table)
    for note, number in notes.items():
        console.print(f"{number:>3}  {note}")
    console.print(
        f"\n{about['system']}, {about['cpus']} CPUs, load {about['loadBefore']} before, Python {about['python']}, "
        f"fdatasync {about['fdatasyncMs']} ms; {found['seconds']:.0f} s"
    )


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}".strip()
