"""`baton`: look at tasks, steer them, run the local stack.

Subcommands are imported when they are used, so that `baton --help` answers at once and a broken part of one
command cannot take the others with it.
"""

from __future__ import annotations

import importlib
import sys

import click

from enqueue.command import run_command

NAME = "baton"

# name → (module, attribute, what it does)
COMMANDS = {
    "tasks": ("ops.tasks", "tasks", "List tasks, newest first."),
    "show": ("ops.tasks", "show", "Show one task."),
    "follow": ("ops.steer", "follow", "Watch a task until it ends, then print its answer."),
    "cancel": ("ops.steer", "cancel", "End a task."),
    "retry": ("ops.steer", "retry", "Queue an ended task again, or wake a parked one."),
    "resolve": ("ops.steer", "resolve", "Say what became of a call that holds a task."),
    "status": ("ops.status", "status", "Count tasks by status; exit code 1 if any is dead."),
    "workers": ("ops.workers", "workers", "List workers; make them quiet, or end them."),
    "env": ("ops.env", "env", 'Print what a plain `rq worker` needs: eval "$(baton env)".'),
    "bench": ("ops.bench.command", "bench", "Measure overhead, rates, memory and takeovers, each beside its floor."),
    "budget": ("ops.budget", "budget", "List, set and clear budgets of tokens."),
    "api": ("ops.api", "api", "List APIs that the fleet waits for; ask one again."),
    "sweep": ("ops.sweep", "sweep", "Hand on tasks whose worker died."),
    "crash-points": ("ops.sweep", "crash_points", "List the points for CRASH_AFTER."),
    "up": ("ops.up", "up", "Run a local fleet in this terminal: Redis, workers, sweeper, dashboard."),
    "demo": ("ops.demo", "demo", "Kill a worker in the middle of a task, and watch the task finish."),
    "drill": ("ops.drill.command", "drill", "Kill everything at random while tasks run, then check every guarantee."),
    "scripted-model": ("ops.scripted_model", "command", "Play a script as a model, over HTTP."),
    "settings": ("ops.show_settings", "settings", "Print every setting, its value here, and what it means."),
    "version": ("ops.status", "version", "Print the version."),
}

EPILOG = """\b
A task is named by its id or by a beginning of it that no other task shares.

\b
Exit codes:
  0    done; with follow: the task succeeded
  1    with follow: it failed, was cancelled or is dead; with status: there are dead tasks;
       with drill: a guarantee was broken
  2    wrong use, wrong input or wrong settings
  3    Redis is away or refuses; with drill: it could not be held
  4    no such task, or its state does not allow it
  130  interrupted
"""


class LazyGroup(click.Group):
    """Knows its subcommands by name; imports one when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, _, about) in COMMANDS.items()])


@click.group(cls=LazyGroup, epilog=EPILOG, invoke_without_command=True)
@click.version_option(package_name="baton-agents", prog_name=NAME, message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Agent tasks that survive kill -9: look at them, steer them, run them here."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    """The console script."""
    sys.exit(run_command(cli, NAME))


if __name__ == "__main__":
    main()
