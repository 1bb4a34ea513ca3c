"""From a kill -9 to the next request of the task at the model, by whoever has taken it over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from enqueue.api import enqueue_task
from ops.bench import tools
from ops.bench.http_model import HttpModel
from ops.bench.place import Place, parent_of
from ops.bench.rates import there
from ops.bench.rows import Row, median
from ops.bench.size import Size
from ops.processes import wait_until

OTHERS = "Restate 0.5 s, Absurd 120 s, RQ and Dramatiq over 150 s"
TAKEOVER_MAX_S = 60


def measure(place: Place, size: Size) -> list[Row]:
    """In seconds, with the settings as they come: a sweep each second, leases of 15 s. Two workers of a pool."""
    rounds = size.pick(1, 2, 5)
    with HttpModel() as model:
        sweeper = place.start("baton", "sweep", ANTHROPIC_BASE_URL=model.url)
        pool = place.pool("fork", "forks", 2, ANTHROPIC_BASE_URL=model.url).listening(2)
        horse = [_takeover_s(place, model, "forks", f"horse{n}", _end) for n in range(rounds)]
        whole = [_takeover_s(place, model, "forks", f"whole{n}", _end_parent) for n in range(rounds)]
        pool.kill()
        rows = [
            Row("takeover, a ForkWorker's horse killed", median(horse), None, "s", note=f"others: {OTHERS}"),
            Row("takeover, a whole ForkWorker killed", median(whole), None, "s", note="by the sweeper"),
        ]
        if there("thread"):
            pool = place.pool("thread", "threads", 2, ANTHROPIC_BASE_URL=model.url).listening(2)
            thread = [_takeover_s(place, model, "threads", f"thread{n}", _end) for n in range(rounds)]
            pool.kill()
            rows.append(Row("takeover, a ThreadWorker killed", median(thread), None, "s", note="by the sweeper"))
        sweeper.kill()
    place.empty()
    return rows


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _end_parent(pid: int) -> None:
    _end(parent_of(pid))


def _takeover_s(place: Place, model: HttpModel, queue: str, name: str, kill: Callable[[int], None]) -> float:
    """`kill` gets the pid of the process that runs the task. The pool replaces what it kills."""
    model.hold()
    text = tools.text_of_task(1, name)
    task = enqueue_task(text, queue=queue, settings=place.settings, client=place.client)
    model.await_arrivals(text)
    key = f"{place.settings.key_prefix}:task:{task.id}"
    if not wait_until(lambda: bool(place.client.hget(key, "beat")), TAKEOVER_MAX_S):
        raise TimeoutError("the lease of a task is not renewed")
    pid = int(task.task().owner["pid"])
    start = time.time()
    kill(pid)
    took = model.await_arrivals(text, 2, timeout_s=TAKEOVER_MAX_S) - start
    model.release()
    task.wait(60)
    return took
