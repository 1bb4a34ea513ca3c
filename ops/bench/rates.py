"""Tasks per second beside plain RQ jobs that do nothing, on the same kind of worker process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from rq import Queue
from rq.job import Job

import worker.fleet
from enqueue.many import enqueue_many
from ops.bench import tools
from ops.bench.jobs import noop
from ops.bench.place import Place, Process
from ops.bench.rows import Bar, Row, median, skipped
from ops.bench.size import Size
from ops.processes import wait_until
from worker.dispatch import job_id

BURST_MAX_S = 240
# our class → (RQ's of the same kind, the bar)
PAIRS = {"thread": ("rq.SimpleWorker", 0.8), "fork": ("rq.Worker", 0.7)}
OTHERS = "Absurd 123/s, Restate 111/s, DBOS 40-48/s, plain RQ 65/s"
DONE = "rq:finished:{}"


def measure(place: Place, size: Size) -> list[Row]:
    """One worker process with one-turn tasks."""
    rows = []
    for kind, (plain, bar) in PAIRS.items():
        name = f"one-turn tasks/s, {named(kind)}"
        if not there(kind):
            rows.append(skipped(name, f"there is no {named(kind)}"))
            continue
        number = size.pick(4, 400, 1000) if kind == "thread" else size.pick(3, 80, 200)
        ours, floor = _against(place, kind, plain, 1, number, 1, size.pick(1, 3, 5))
        rows.append(Row(name, ours, floor, "/s", Bar("ratio", least=bar), f"floor: no-op jobs on {plain}"))
    return rows


def measure_five(place: Place, size: Size) -> list[Row]:
    """Two worker processes with tasks of five turns."""
    rows = []
    for kind, (plain, _) in PAIRS.items():
        name = f"five-turn tasks/s on 2 x {named(kind)}"
        if not there(kind):
            rows.append(skipped(name, f"there is no {named(kind)}"))
            continue
        ours, floor = _against(place, kind, plain, 2, size.pick(3, 200, 200), 5, size.pick(1, 1, 3))
        rows.append(Row(name, ours, floor, "/s", note=f"floor: no-op jobs on 2 x {plain}; others: {OTHERS}"))
    return rows


def named(kind: str) -> str:
    return {"thread": "ThreadWorker", "fork": "ForkWorker"}[kind]


def there(kind: str) -> bool:
    return hasattr(worker.fleet, named(kind))


def _against(
    place: Place, kind: str, plain: str, workers: int, number: int, turns: int, rounds: int
) -> tuple[float, float]:
    """Medians of tasks and of plain jobs per second, measured in turns."""
    ours = [place.worker(kind, "ours") if workers == 1 else place.pool(kind, "ours", workers)]
    floor = [place.worker(plain, "floor") for _ in range(workers)]
    for process in floor:
        process.listening()
    ours[0].listening(workers)
    rates: dict[str, list[float]] = {"ours": [], "floor": []}
    for _ in range(rounds):
        rates["ours"].append(_burst(place, ours, "ours", lambda: _tasks(place, number, turns)))
        rates["floor"].append(_burst(place, floor, "floor", lambda: _jobs(place, number)))
    for process in [*ours, *floor]:
        process.kill()
    place.empty()
    return median(rates["ours"]), median(rates["floor"])


def _burst(place: Place, workers: Sequence[Process], queue: str, enqueue: Callable[[], list[str]]) -> float:
    """Jobs per second, from the first one's start to the last one's end. They lie there before the first starts."""
    for process in workers:
        process.signal_all(signal.SIGSTOP)
    before = place.client.zcard(DONE.format(queue))
    jobs = enqueue()
    for process in workers:
        process.signal_all(signal.SIGCONT)
    wanted = before + len(jobs)
    if not wait_until(lambda: place.client.zcard(DONE.format(queue)) >= wanted, BURST_MAX_S):
        raise RuntimeError(f"not all of {len(jobs)} jobs on {queue} ended well within {BURST_MAX_S} s")
    time.sleep(0.1)
    with place.client.pipeline(transaction=False) as pipe:
        for job in jobs:
            pipe.hmget(Job.key_for(job), "started_at", "ended_at")
        times = pipe.execute()
    first, last = min(_seconds(start) for start, _ in times), max(_seconds(end) for _, end in times)
    return len(jobs) / (last - first)


def _tasks(place: Place, number: int, turns: int) -> list[str]:
    texts = [tools.text_of_task(turns, n) for n in range(number)]
    made = enqueue_many(texts, queue="ours", settings=place.settings, client=place.client)
    return [job_id(one.id, 1) for one in made]


def _jobs(place: Place, number: int) -> list[str]:
    datas = [Queue.prepare_data(noop, (f"task-{n}", n), timeout=-1, result_ttl=600) for n in range(number)]
    return [job.id for job in Queue("floor", connection=place.client).enqueue_many(datas)]


def _seconds(raw: Any) -> float:
    return datetime.fromisoformat(raw.decode()).timestamp()
