"""`baton drill`: chaos that ends with a verdict."""

from __future__ import annotations

import random
import signal
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from enqueue.command import print_json
from enqueue.plain import plain
from ops.drill.plan import ABOUT, CLASSES, KINDS, OF_HORSES, SABOTAGES
from worker.errors import BatonError, InvalidInput

if TYPE_CHECKING:  # not for --help: they import half of the product
    from ops.drill.hold import Options, Outcome
    from ops.drill.show import Show

HELD, BROKEN = 0, 1

EPILOG = "\b\nKinds of kills:\n{}".format("\n".join(f"  {kind:<8} {about}" for kind, about in ABOUT.items())) + (
    """

\b
Exit codes:
  0    no guarantee broken
  1    a guarantee broken; with --matrix: a line is not as expected
  2    wrong use: an option, the tools module or the script
  3    the environment failed: the server or the workers did not start; says nothing about the guarantees
  130  interrupted
"""
)


@click.command(epilog=EPILOG)
@click.option("--tasks", type=click.IntRange(1, 10_000), default=60, show_default=True, help="How many tasks.")
@click.option("--workers", type=click.IntRange(1, 64), default=3, show_default=True, help="How many workers.")
@click.option("--seconds", type=click.FloatRange(1, 3600), default=30, show_default=True, help="How long to kill.")
@click.option("--kill", "kill", default=",".join(KINDS), show_default=True, metavar="KINDS", help="What is killed.")
@click.option("--seed", type=click.IntRange(0), help="Gives the same schedule of kills again.  [default: a new one]")
@click.option("--turns", type=click.IntRange(2, 1000), default=10, show_default=True, help="Turns of each task.")
@click.option("--worker-class", type=click.Choice(CLASSES), default="fork", show_default=True, help="Of which class.")
@click.option("--tools", default="", metavar="MODULE", help="Your own tools, instead of the drill's; needs --script.")
@click.option("--script", type=click.Path(path_type=Path, dir_okay=False), help="What the scripted model says (JSON).")
@click.option("--control/--no-control", default=True, help="Run the same tasks without kills first, to compare.")
@click.option("--matrix", is_flag=True, help="Instead of chaos: one death at every crash point, for every effect.")
@click.option("--sabotage", metavar="NAME",
              help=f"Instead: one protection off, which the verdict must notice: {', '.join(SABOTAGES)}.")  # fmt: skip
@click.option("--report", type=click.Path(path_type=Path, file_okay=False), help="Leave a report in this directory.")
@click.option("--dir", "home", type=click.Path(file_okay=False, path_type=Path), default=Path(".baton/drill"),
              show_default=True, help="Where the drill takes place; its logs are left there.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def drill(
    tasks: int,
    workers: int,
    seconds: float,
    kill: str,
    seed: int | None,
    turns: int,
    worker_class: str,
    tools: str,
    script: Path | None,
    control: bool,
    matrix: bool,
    sabotage: str | None,
    report: Path | None,
    home: Path,
    as_json: bool,
) -> int:
    """Kill workers, work-horses, sweepers and Redis while tasks run, then check every guarantee.

    Everything is real but the model, which plays a script: an embedded Valkey, `rq worker` processes, the anthropic
    client. All of it is the drill's own; nothing else is touched. What happened is read from outside: from a log that
    each tool writes when it really runs, and from the model's log of requests.

    Your own tools are put through the same with --tools and --script; each of their runs is recorded.
    """
    from ops.drill.arena import fresh
    from ops.drill.fleet import EnvironmentFailed
    from ops.drill.hold import Options, hold
    from ops.drill.show import show_for

    if matrix and sabotage:
        raise click.UsageError("--matrix and --sabotage exclude each other")
    if (matrix or sabotage) and worker_class != "fork":
        raise click.UsageError("--worker-class is for drills of chaos; --matrix and --sabotage have their own")
    if sabotage and (tools or script):
        raise click.UsageError("--sabotage uses the drill's own tools")
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    options = Options(
        tasks, workers, seconds, _kinds(kill, worker_class), seed, turns, _checked(tools, script), script, control,
        worker_class=worker_class,
    )  # fmt: skip
    console = Console(highlight=False)
    if report:
        _make(report, home)
    try:
        with _ending_on_signals(), fresh(home) as place, show_for(console, silent=as_json) as show:
            if matrix:
                return _matrix(place, options, show, report, as_json)
            if sabotage:
                outcome, options = _sabotaged(place, sabotage, options, show)
            else:
                outcome = hold(place, options, show)
        code = _tell(outcome, options, as_json)
        if report:
            _report(report, outcome, options, console, as_json)
        return code
    except (BatonError, click.ClickException):
        raise
    except Exception as error:  # a fault of the drill is no verdict, and a traceback would end with 1
        traceback.print_exc()
        raise EnvironmentFailed(f"the drill itself failed: {error!r}") from error


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM, and a terminal that was closed, end a drill as Ctrl-C does: with everything it started. Not under nohup,
    which has them ignored."""
    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kinds(text: str, worker_class: str) -> tuple[str, ...]:
    if worker_class == "thread" and text == ",".join(KINDS):
        text = ",".join(kind for kind in KINDS if kind not in OF_HORSES)
    kinds = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise click.UsageError(f"--kill {unknown[0]}: expected some of {', '.join(KINDS)}")
    if worker_class == "thread" and (of_horses := OF_HORSES.intersection(kinds)):
        raise click.UsageError(f"--kill {sorted(of_horses)[0]}: a worker with threads has no work-horse")
    if not kinds:
        raise click.UsageError(f"--kill: expected some of {', '.join(KINDS)}")
    return kinds


def _checked(tools: str, script: Path | None) -> str:
    """The module, if it can be imported and has tools: better told now than by workers that do not start."""
    if tools and script is None:
        raise click.UsageError("--tools needs --script: the drill cannot know what to call your tools with")
    if tools:
        from worker.settings import load_settings
        from worker.tools import load_toolbox

        load_toolbox([tools], load_settings({}))
    return tools


def _sabotaged(home: Path, name: str, options: Options, show: Show) -> tuple[Outcome, Options]:
    from ops.drill.sabotage_drill import DRILLS, sabotaged

    if name not in DRILLS:
        raise click.UsageError(f"--sabotage {name}: expected one of {', '.join(DRILLS)}")
    return sabotaged(home, name, options.seed, show)


def _matrix(home: Path, options: Options, show: Show, report: Path | None, as_json: bool) -> int:
    from ops.drill.matrix import run_matrix
    from ops.drill.report import write_matrix

    lines = run_matrix(home, options.tools, options.script, show)
    wrong = [line for line in lines if not line.ok]
    if as_json:
        print_json({"ok": not wrong, "lines": [line.document() for line in lines]})
    else:
        click.echo(f"\n{len(lines)} lines, {len(wrong)} not as expected")
    if report:
        write_matrix(report, lines)
    return BROKEN if wrong else HELD


def _make(report: Path, home: Path) -> None:
    """Now, and not when the drill is over, is the time to find out that there is no room for its report."""
    if report.resolve().is_relative_to(home.resolve()):
        raise InvalidInput(f"{report}: the report would be cleared away with {home}; name another with --report")
    try:
        report.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=report):
            pass
    except OSError as error:
        raise InvalidInput(f"{report}: the report cannot be written: {error.strerror}") from None


def _report(directory: Path, outcome: Outcome, options: Options, console: Console, as_json: bool) -> None:
    from ops.drill.report import write_report

    try:
        written = write_report(directory, outcome, options)
    except Exception as error:  # the verdict is out, and stands
        click.echo(f"the report could not be written: {error!r}", err=True)
        return
    if not as_json:
        console.print(f"report: {', '.join(map(str, written))}", soft_wrap=True)


def _tell(outcome: Outcome, options: Options, as_json: bool) -> int:
    from ops.drill.words import lines_of

    code = HELD if outcome.verdict.holds else BROKEN
    if as_json:
        asked: dict[str, Any] = {"tasks": options.tasks, "workers": options.workers, "turns": options.turns}
        asked |= {"seconds": options.seconds, "kill": options.kinds, "sabotage": options.sabotage}
        asked["workerClass"] = options.worker_class
        kills = [vars(hit) | {"tasks": list(hit.tasks)} for hit in outcome.facts.hits]
        document = {"seed": options.seed, "options": asked}
        print_json({**document, **outcome.verdict.document(), "kills": kills, "exitCode": code})
        return code
    for line in lines_of(outcome.verdict):
        click.echo(plain(line))
    click.echo(f"Again: {options.command_line()}")
    return code
