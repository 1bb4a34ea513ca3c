"""`baton env`: what a plain `rq worker agents` needs to know, as lines for `eval`.

    eval "$(baton env)"
    rq worker agents

RQ reads its address and its worker class from variables of its own; this prints them as Baton's settings have them.
"""

from __future__ import annotations

import json
import shlex

import click

from ops.forked import WORKER_CLASSES
from worker.settings import Settings, load_settings


def variables(settings: Settings, worker_class: str) -> dict[str, str]:
    """Name → value, for RQ and for Baton in the same process. The address may hold a password."""
    return {
        "RQ_REDIS_URL": settings.redis_url,
        "RQ_WORKER_CLASS": WORKER_CLASSES[worker_class],
        "BATON_REDIS_URL": settings.redis_url,
        "BATON_KEY_PREFIX": settings.key_prefix,
        "BATON_QUEUE": settings.queue,
    }


@click.command("env")
@click.option(
    "--worker-class", default="fork", show_default=True, type=click.Choice(list(WORKER_CLASSES)),
    help="One task per process, up to BATON_CONCURRENCY tasks in each, or RQ's own worker.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead.")
def env(worker_class: str, as_json: bool) -> None:
    """Print the variables that make a plain `rq worker` right: eval "$(baton env)".

    They are printed whole: a password in the address, too.
    """
    found = variables(load_settings(), worker_class)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        click.echo(f"export {name}={shlex.quote(value)}")
