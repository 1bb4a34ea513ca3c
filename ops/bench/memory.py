"""Memory per task that waits for the model: proportional set size of all processes of the fleet."""

from __future__ import annotations

import time
from dataclasses import replace

from enqueue.many import enqueue_many
from ops.bench import tools
from ops.bench.http_model import HttpModel
from ops.bench.place import Place, Process, pss_mib
from ops.bench.rates import there
from ops.bench.rows import Bar, Row, skipped
from ops.bench.size import Size
from ops.processes import wait_until

END_MAX_S = 240
OTHERS = "tasks in flight per GiB without a real client: Absurd 3600, DBOS 1600, RQ 22"


def measure(place: Place, size: Size) -> list[Row]:
    """MiB per waiting task, the workers' own memory included."""
    with HttpModel() as model:
        floor = _stock(place, model, size.pick(0, 2, 3))
        rows = _threads(place, model, floor, [size.pick(2, 50, 50), size.pick(3, 200, 200), size.pick(4, 1000, 1000)])
        return [*rows, _forks(place, model, floor, size.pick(2, 40, 40))]


def _stock(place: Place, model: HttpModel, workers: int) -> float | None:
    """MiB per task on RQ's own worker, one process each."""
    if not workers:
        return None
    processes = [place.worker("stock", "plain", ANTHROPIC_BASE_URL=model.url) for _ in range(workers)]
    for process in processes:
        process.listening()
    model.hold()
    _enqueue(place, "plain", workers)
    model.await_waiting(workers)
    used = sum(_settled_pss(process) for process in processes)
    _finish(place, model, workers)
    for process in processes:
        process.kill()
    return used / workers


def _threads(place: Place, model: HttpModel, floor: float | None, numbers: list[int]) -> list[Row]:
    name = "MiB per waiting task, ThreadWorker"
    if not there("thread"):
        return [skipped(name, "there is no ThreadWorker")]
    most = {"BATON_CONCURRENCY": str(numbers[-1]), "ANTHROPIC_BASE_URL": model.url}
    process = place.worker("thread", "threads", **most).listening()
    rows, waiting = [], 0
    model.hold()
    for number in numbers:
        _enqueue(place, "threads", number - waiting)
        start = time.monotonic()
        model.await_waiting(number)
        waiting, took = number, time.monotonic() - start
        used = _settled_pss(process)
        bar = Bar("ours", most=0.5) if number == 1000 else None
        note = f"{used:.0f} MiB, {number / used * 1024:.0f} tasks per GiB; all waited after {took:.1f} s"
        rows.append(Row(f"{name}, {number} tasks", used / number, floor, "MiB", bar, note))
    took = _finish(place, model, waiting)
    note = f"{rows[-1].note}; all ended well {took:.1f} s after the answer; {OTHERS}"
    rows[-1] = replace(rows[-1], note=note)
    process.kill()
    return rows


def _forks(place: Place, model: HttpModel, floor: float | None, workers: int) -> Row:
    """A pool as `baton up` runs it."""
    process = place.pool("fork", "forks", workers, ANTHROPIC_BASE_URL=model.url).listening(workers)
    model.hold()
    _enqueue(place, "forks", workers)
    model.await_waiting(workers)
    used = _settled_pss(process)
    _finish(place, model, workers)
    process.kill()
    bar = Bar("ours", most=25) if workers >= 40 else None
    note = f"{used:.0f} MiB; floor: stock rq workers"
    return Row(f"MiB per waiting task, {workers} ForkWorkers of a pool", used / workers, floor, "MiB", bar, note)


def _enqueue(place: Place, queue: str, number: int) -> None:
    start = time.monotonic_ns()  # no two texts alike
    texts = [tools.text_of_task(1, f"{queue} {start + n}") for n in range(number)]
    enqueue_many(texts, queue=queue, settings=place.settings, client=place.client)


def _settled_pss(process: Process) -> float:
    time.sleep(0.5)  # let what the start of the tasks has left to do be done
    return pss_mib(process.pid)


def _finish(place: Place, model: HttpModel, number: int) -> float:
    """Answer them all, and see each of them succeed. Seconds."""
    finished = f"{place.settings.key_prefix}:finished"
    model.release()
    start = time.monotonic()
    if not wait_until(lambda: place.client.zcard(finished) >= number, END_MAX_S):
        raise RuntimeError(f"only {place.client.zcard(finished)} of {number} tasks ended within {END_MAX_S} s")
    took = time.monotonic() - start
    ids = [raw.decode() for raw in place.client.zrange(finished, 0, -1)]
    with place.client.pipeline(transaction=False) as pipe:
        for task_id in ids:
            pipe.hget(f"{place.settings.key_prefix}:task:{task_id}", "status")
        ended = set(pipe.execute())
    if ended != {b"succeeded"}:
        raise RuntimeError(f"tasks of the bench ended as {ended}")
    time.sleep(0.2)
    place.empty()
    return took
