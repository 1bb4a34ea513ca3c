"""One sweep over many tasks: what it costs the server, which everybody shares, and how long it takes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from ops.bench.place import Place
from ops.bench.rows import Bar, Row, median
from ops.bench.size import Size
from worker.dispatch import job_id
from worker.process import this_process
from worker.state.codec import encode
from worker.state.keys import Keys
from worker.sweeper import Sweeper, make_sweeper

BATCH = 2_000
IDLE_BAR = Bar("ours", most=50)
NOT_ITS_OWN = ("info", "config|resetstat", "config", "client|setinfo", "hello")


def measure(place: Place, size: Size) -> list[Row]:
    """Redis's time and the whole time, idle tasks alone and with running ones. The floor is a sweep with no tasks."""
    idle, running, sweeps = size.pick(40, 100_000, 100_000), size.pick(3, 1000, 1000), size.pick(1, 5, 15)
    sweeper = make_sweeper(place.settings)
    sweeper.sweep_once()
    floor_redis, floor_wall = _sweeps(place, sweeper, sweeps)
    build_idle(place, idle)
    redis_ms, wall_ms = _sweeps(place, sweeper, sweeps)
    bar = IDLE_BAR if idle >= 100_000 else None
    what = f"one sweep, {idle} queued and finished"
    rows = [
        Row(f"{what}, Redis time", redis_ms, floor_redis, "ms", bar, "floor: a sweep of nothing"),
        Row(f"{what}, in all", wall_ms, floor_wall, "ms"),
    ]
    build_running(place, running)
    redis_ms, wall_ms = _sweeps(place, sweeper, sweeps)
    rows += [
        Row(f"  and {running} running, Redis time", redis_ms, floor_redis, "ms"),
        Row(f"  and {running} running, in all", wall_ms, floor_wall, "ms"),
    ]
    sweeper.store.client.close()
    place.empty()
    return rows


def build_idle(place: Place, number: int) -> None:
    """Half of them queued, with their jobs, half of them finished."""
    keys, queue, now = Keys(place.settings.key_prefix), place.settings.queue, int(time.time() * 1000)

    def put(pipe: Any, n: int) -> None:
        task_id, ended = f"idle{n}", n % 2
        about = {"status": "succeeded" if ended else "queued", "delivery": 1, "queue": queue, "text": "x" * 100}
        pipe.hset(keys.task(task_id), mapping=about)
        pipe.zadd(keys.index("finished" if ended else "queued"), {task_id: now + n})
        if not ended:
            pipe.rpush(f"rq:queue:{queue}", job_id(task_id, 1))

    _pipelined(place, range(number), put)


def build_running(place: Place, number: int) -> None:
    """All held by this process, and well."""
    keys, now = Keys(place.settings.key_prefix), int(time.time() * 1000)
    owner, run_id = encode(this_process()), place.client.info("server")["run_id"]
    beat = f"1:{run_id}:{place.client.client_id()}"

    def put(pipe: Any, n: int) -> None:
        task_id, fence = f"running{n}", f"1:{secrets.token_hex(8)}"
        about = {"status": "running", "delivery": 1, "queue": place.settings.queue, "owner": owner, "beat": beat}
        pipe.hset(keys.task(task_id), mapping=about)
        pipe.set(keys.epoch(task_id), fence)
        pipe.set(keys.lock(task_id), fence, px=600_000)
        pipe.zadd(keys.index("running"), {task_id: now + 600_000})

    _pipelined(place, range(number), put)


def _pipelined(place: Place, numbers: Iterable[int], put: Callable[[Any, int], None]) -> None:
    place.client.config_set("appendfsync", "no")
    pipe = place.client.pipeline(transaction=False)
    for n in numbers:
        put(pipe, n)
        if len(pipe.command_stack) >= BATCH:
            pipe.execute()
    pipe.execute()
    place.client.config_set("appendfsync", "always")


def _sweeps(place: Place, sweeper: Sweeper, number: int) -> tuple[float, float]:
    """Medians of (Redis's time, whole time) in ms."""
    redis_ms, wall_ms = [], []
    for _ in range(number):
        place.client.config_resetstat()
        start = time.perf_counter()
        report = sweeper.sweep_once()
        wall_ms.append((time.perf_counter() - start) * 1000)
        if report:
            raise RuntimeError(f"the bench's sweep found something to do: {report.lines()[:3]}")
        stats = place.client.info("commandstats")
        used = {name.removeprefix("cmdstat_"): about["usec"] for name, about in stats.items()}
        redis_ms.append(sum(usec for name, usec in used.items() if name not in NOT_ITS_OWN) / 1000)
    return median(redis_ms), median(wall_ms)
