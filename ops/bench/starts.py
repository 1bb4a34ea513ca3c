"""From the push of a task to its first request at the model."""

from __future__ import annotations

import time
from datetime import datetime

from rq import Queue

from enqueue.api import enqueue_task
from ops.bench import tools
from ops.bench.http_model import HttpModel
from ops.bench.jobs import noop
from ops.bench.place import Place
from ops.bench.rates import named, there
from ops.bench.rows import Bar, Row, median
from ops.bench.size import Size
from ops.processes import wait_until


def measure(place: Place, size: Size) -> list[Row]:
    """A row for each kind of worker, in ms; the floor is the start of a plain job on RQ's worker."""
    rows = []
    rounds = {"fork": size.pick(1, 10, 20), "thread": size.pick(1, 10, 20), "stock": size.pick(1, 3, 5)}
    with HttpModel() as model:
        floor_worker = place.worker("stock", "floor")
        kinds = [kind for kind in rounds if kind == "stock" or there(kind)]
        workers = {kind: place.worker(kind, kind, ANTHROPIC_BASE_URL=model.url) for kind in kinds}
        for process in (floor_worker, *workers.values()):
            process.listening()
        for kind in kinds:
            ours, floor = [], []
            for number in range(rounds[kind]):
                ours.append(_first_request_ms(place, model, kind, f"{kind}{number}"))
                floor.append(_job_start_ms(place))
            name = "stock rq worker" if kind == "stock" else named(kind)
            bar = Bar("ours", most=100) if kind == "fork" else None
            note = "floor: start of a no-op job on rq.Worker"
            rows.append(Row(f"push to first request, {name}", median(ours), median(floor), "ms", bar, note))
        for process in (floor_worker, *workers.values()):
            process.kill()
    place.empty()
    return rows


def _first_request_ms(place: Place, model: HttpModel, queue: str, name: str) -> float:
    text = tools.text_of_task(1, name)
    start = time.time()
    task = enqueue_task(text, queue=queue, settings=place.settings, client=place.client)
    took = model.await_arrivals(text) - start
    task.wait(60)
    time.sleep(0.05)  # RQ closes the job after the task has ended
    return took * 1000


def _job_start_ms(place: Place) -> float:
    start = time.time()
    job = Queue("floor", connection=place.client).enqueue_call(noop, args=("floor", 1), timeout=-1)
    if not wait_until(lambda: bool(place.client.hget(job.key, "ended_at")), 60):
        raise RuntimeError("a no-op job does not end")
    began = datetime.fromisoformat(place.client.hget(job.key, "started_at").decode())
    return (began.timestamp() - start) * 1000
