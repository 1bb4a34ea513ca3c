"""`baton workers`: who works here, who is to take no more tasks, who is to end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import click
from rq.command import PUBSUB_CHANNEL_TEMPLATE, send_shutdown_command
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE
from rq.worker import BaseWorker

from enqueue.command import note, print_json
from enqueue.plain import duration
from ops.reach import Reach, reach
from ops.tables import print_table
from worker.dispatch import WORKER_CLASS_FIELD, parts_of
from worker.errors import BatonError, InvalidInput
from worker.state.standing import text

STOCK = "stock"
POLL_S = 0.2


class NoSuchWorker(BatonError):
    """There is no such worker."""

    exit_code = 4


@dataclass(frozen=True)
class Worker:
    """As RQ lists it. `kind`: our class, or "stock". `hears`: somebody listens to RQ's commands for it; a worker that
    was killed stays listed for a while and does not."""

    name: str
    kind: str
    host: str
    pid: int
    state: str
    queues: tuple[str, ...]
    tasks: tuple[str, ...]
    last_seen: str
    hears: bool


@click.group("workers", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def workers(context: click.Context, as_json: bool) -> None:
    """List workers; make some quiet (they take no more tasks and keep what they have), or end them.

    A worker is named by its name or by a beginning of it that no other worker shares.
    """
    if context.invoked_subcommand is not None:
        return
    found = listed(reach())
    if as_json:
        print_json([_document(worker) for worker in found])
        return
    headings = ("NAME", "CLASS", "HOST", "PROCESS", "STATE", "QUEUES", "SEEN", "TASKS")
    print_table(headings, [_line(worker) for worker in found], empty="no workers")


@workers.command("quiet")
@click.argument("names", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All there are now.")
def quiet(names: tuple[str, ...], every: bool) -> None:
    """Workers NAMES take no more tasks until `resume`; what they run goes on."""
    reached = reach()
    chosen = _chosen(listed(reached), names, every)
    unable = [worker for worker in chosen if worker.kind == STOCK]
    for worker in unable:
        said = (
            f"{worker.name} is a stock RQ worker, which cannot be told to be quiet: `rq suspend` holds up all workers, "
            f"`baton workers drain {worker.name}` ends this one"
        )
        if not every:
            raise InvalidInput(said)
        note("baton", said)
    for worker in chosen:
        if worker not in unable:
            reached.store.client.sadd(reached.store.keys.quiet(), worker.name)
            click.echo(f"{worker.name}: quiet; {_has(worker)}")


@workers.command("resume")
@click.argument("names", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All there are.")
def resume(names: tuple[str, ...], every: bool) -> None:
    """Workers NAMES take tasks again."""
    reached = reach()
    for worker in _chosen(listed(reached), names, every):
        was = reached.store.client.srem(reached.store.keys.quiet(), worker.name)
        click.echo(f"{worker.name}: {'takes tasks again' if was else 'was not quiet'}")


@workers.command("drain")
@click.argument("names", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All there are now.")
@click.option("--wait", is_flag=True, help="Until they are gone.")
def drain(names: tuple[str, ...], every: bool, wait: bool) -> None:
    """Workers NAMES hand over what they run, and end."""
    reached = reach()
    waiting: dict[str, Worker] = {}
    for worker in _chosen(listed(reached), names, every):
        if not worker.hears:
            note("baton", f"{worker.name}: nobody hears it; it was killed, and RQ forgets it by itself")
            continue
        send_shutdown_command(reached.store.client, worker.name)
        waiting[worker.name] = worker
        click.echo(f"{worker.name}: told to end; {_has(worker)}")
    if wait:
        _wait(reached, waiting, lambda name, s: click.echo(f"{name}: gone after {duration(s)}"))


def listed(reached: Reach) -> list[Worker]:
    """All workers RQ knows, by host and name. Takes quiet marks of those that are gone out of Redis."""
    client: Any = reached.store.client
    quiet_key, prefix = reached.store.keys.quiet(), BaseWorker.redis_worker_namespace_prefix
    names = sorted(text(key).removeprefix(prefix) for key in client.smembers(BaseWorker.redis_workers_keys))
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hgetall(prefix + name)
            pipe.smembers(WORKER_EXECUTIONS_KEY_TEMPLATE.format(name))
        replies = pipe.execute()
    quiet_ones = {text(name) for name in client.smembers(quiet_key)}
    heard = dict(client.pubsub_numsub(*(PUBSUB_CHANNEL_TEMPLATE % name for name in names))) if names else {}
    heard_by = {text(channel): bool(number) for channel, number in heard.items()}
    found = []
    for number, name in enumerate(names):
        fields = {text(field): text(value) for field, value in replies[2 * number].items()}
        if fields.get("birth") and not fields.get("death"):
            jobs = [text(member).partition(":")[0] for member in replies[2 * number + 1]]
            hears = heard_by.get(PUBSUB_CHANNEL_TEMPLATE % name, False)
            found.append(_worker(name, fields, jobs, quiet=name in quiet_ones, hears=hears))
    if gone := quiet_ones - {worker.name for worker in found}:
        client.srem(quiet_key, *gone)
    return sorted(found, key=lambda worker: (worker.host, worker.name))


def _worker(name: str, fields: dict[str, str], jobs: list[str], *, quiet: bool, hears: bool) -> Worker:
    state = fields.get("state", "?")
    if not hears:
        state = "lost"
    elif fields.get("shutdown_requested_date"):
        state = "draining"
    elif quiet:
        state = "quiet"
    return Worker(
        name=name,
        kind=fields.get(WORKER_CLASS_FIELD) or STOCK,
        host=fields.get("hostname", "?"),
        pid=int(fields.get("pid") or 0),
        state=state,
        queues=tuple(fields.get("queues", "").split(",")),
        tasks=tuple(sorted(parts_of(job)[0] or job for job in jobs)),
        last_seen=fields.get("last_heartbeat", ""),
        hears=hears,
    )


def _chosen(found: list[Worker], names: tuple[str, ...], every: bool) -> list[Worker]:
    if bool(names) == every:
        raise click.UsageError("name workers, or say --all")
    if every:
        return found
    return list({worker.name: worker for worker in (_find(found, name) for name in names)}.values())


def _find(found: list[Worker], prefix: str) -> Worker:
    fitting = [worker for worker in found if worker.name.startswith(prefix)]
    exact = [worker for worker in fitting if worker.name == prefix]
    if not fitting:
        raise NoSuchWorker(f"there is no worker {prefix}; `baton workers` lists them")
    if len(fitting) > 1 and not exact:
        names = ", ".join(worker.name for worker in fitting[:5])
        raise InvalidInput(f"{prefix!r} begins the names of several workers: {names}")
    return (exact or fitting)[0]


def _wait(reached: Reach, waiting: dict[str, Worker], tell: Callable[[str, float], None]) -> None:
    began, shown = time.monotonic(), set(waiting)
    while shown:
        time.sleep(POLL_S)
        there = {worker.name for worker in listed(reached) if worker.hears}
        for name in sorted(shown - there):
            shown.discard(name)
            tell(name, time.monotonic() - began)


def _has(worker: Worker) -> str:
    return f"it runs {', '.join(worker.tasks)}" if worker.tasks else "it runs nothing"


def _seen_s(worker: Worker) -> float | None:
    try:
        at = datetime.fromisoformat(worker.last_seen)
    except ValueError:
        return None
    return max(0.0, (datetime.now(UTC) - at.replace(tzinfo=at.tzinfo or UTC)).total_seconds())


def _line(worker: Worker) -> tuple[object, ...]:
    seen_s = _seen_s(worker)
    seen = "?" if seen_s is None else f"{duration(seen_s)} ago"
    tasks = ", ".join(worker.tasks) or "-"
    queues = ",".join(worker.queues)
    return worker.name, worker.kind, worker.host, worker.pid, worker.state, queues, seen, tasks


def _document(worker: Worker) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(worker).items() if name not in ("kind", "last_seen")}
    return {**fields, "class": worker.kind, "lastSeen": worker.last_seen}
