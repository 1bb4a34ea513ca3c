"""`baton sweep`: the sweeper as a process, or one pass. And `baton crash-points`."""

from __future__ import annotations

import click

from enqueue.command import print_json
from enqueue.plain import plain
from ops.tables import print_fields


@click.command("sweep")
@click.option("--once", is_flag=True, help="One pass, then say what it did.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print one JSON document.")
def sweep(once: bool, as_json: bool) -> None:
    """Hand on tasks whose worker died, deliver lost ones again, wake parked ones.

    Runs until SIGTERM or Ctrl-C, a pass every BATON_SWEEP_PERIOD_S. Any number of sweepers may run. Waits for a
    Redis that is away.
    """
    if as_json and not once:
        raise click.UsageError("--json needs --once")
    from worker.log import show_events
    from worker.settings import load_settings
    from worker.state.transact import connect
    from worker.sweeper import make_sweeper, run_forever

    settings = load_settings()
    connect(settings.redis_url)  # a wrong URL is a wrong setting, not an outage to wait for
    show_events()
    if not once:
        run_forever(settings)
        return
    report = make_sweeper(settings).sweep_once()
    if as_json:
        recovered = {task: {"status": status, "proof": proof} for task, (status, proof) in report.recovered.items()}
        print_json({**vars(report), "recovered": recovered})
        return
    for line in report.lines() or ["nothing to do"]:
        click.echo(plain(line))


@click.command("crash-points")
def crash_points() -> None:
    """List the points at which a worker can be told to die.

    CRASH_AFTER=LABEL:N in a worker's environment kills the process that runs a task (under RQ the work-horse, a new
    one for each delivery) with SIGKILL, when it passes that point for the Nth time. With CRASH_ONCE=FILE too, only
    the first process of a fleet dies: the one that creates FILE.
    """
    from worker.crashpoints import POINTS

    print_fields(POINTS)
    click.echo(
        "\nCRASH_AFTER=after-effect-write:3 CRASH_ONCE=died rq worker agents     (one work-horse dies, once)", err=True
    )
