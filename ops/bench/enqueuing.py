"""How fast tasks are accepted, beside plain RQ jobs: one by one, and many at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rq import Queue

from enqueue.api import enqueue_task
from enqueue.many import enqueue_many
from ops.bench import tools
from ops.bench.jobs import noop
from ops.bench.place import Place
from ops.bench.rows import Row, median
from ops.bench.size import Size

RQ_OPTIONS: dict[str, Any] = {"timeout": -1, "result_ttl": 600, "failure_ttl": 600}  # as our deliveries have


def measure(place: Place, size: Size) -> list[Row]:
    """Two rows, in tasks per second."""
    rounds = size.pick(1, 5, 10)
    one = size.pick(3, 100, 200)
    many = size.pick(5, 1000, 2000)
    ones = [_side_by_side(place, one, one_by_one, _plain) for _ in range(rounds)]
    manies = [_side_by_side(place, many, at_once, _plain_many) for _ in range(rounds)]
    place.empty()
    return [
        Row("enqueue_task", *_medians(ones), "/s", note="floor: Queue.enqueue"),
        Row("enqueue_many", *_medians(manies), "/s", note="floor: Queue.enqueue_many"),
    ]


def one_by_one(place: Place, number: int) -> None:
    for n in range(number):
        enqueue_task(tools.text_of_task(1, n), settings=place.settings, client=place.client)


def at_once(place: Place, number: int) -> None:
    texts = (tools.text_of_task(1, n) for n in range(number))
    enqueue_many(texts, settings=place.settings, client=place.client)


def _plain(place: Place, number: int) -> None:
    queue = Queue("floor", connection=place.client)
    for n in range(number):
        queue.enqueue_call(noop, args=(f"task-{n}", n), **RQ_OPTIONS)


def _plain_many(place: Place, number: int) -> None:
    datas = [Queue.prepare_data(noop, (f"task-{n}", n), **RQ_OPTIONS) for n in range(number)]
    Queue("floor", connection=place.client).enqueue_many(datas)


Act = Callable[[Place, int], None]


def _side_by_side(place: Place, number: int, ours: Act, floor: Act) -> tuple[float, float]:
    """Tasks per second of both, one after the other."""
    return _rate(place, number, ours), _rate(place, number, floor)


def _rate(place: Place, number: int, act: Act) -> float:
    start = time.perf_counter()
    act(place, number)
    return number / (time.perf_counter() - start)


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return median(ours for ours, _ in pairs), median(floor for _, floor in pairs)
