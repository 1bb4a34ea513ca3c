"""What durability costs per turn: the real store and agent against the same commands without guards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from ops.bench import tools
from ops.bench.place import Place
from ops.bench.rows import Bar, Row, median
from ops.bench.size import Size
from worker.dispatch import open_store
from worker.model import Response
from worker.runtime import Runtime
from worker.settings import Settings
from worker.state.store import Store
from worker.state.task import NewTask

WINDOW = 9  # a turn is measured with so many before and after it
OTHERS = "Absurd 1.9 ms, Restate 3.3, DBOS 3.9-6.5, LangGraph-Postgres 8.3 to 201"

Command = tuple[Any, ...]


def measure(place: Place, size: Size) -> list[Row]:
    """Rows for the median turn and for turns 10, 100 and 1000."""
    turns = size.pick(12, 1000, 1000)
    at = [turn for turn in (10, 100, 1000) if turn <= turns]
    courses = [_course(place, turns, at) for _ in range(size.pick(1, 1, 3))]
    ours = {turn: median(ms for course in courses for ms in course.around(turn, course.ours)) for turn in at}
    floor = {turn: median(ms for course in courses for ms in course.around(turn, course.floor)) for turn in at}
    bytes_ = {turn: median(n for course in courses for n in course.around(turn, course.written)) for turn in at}
    all_ours = median(ms for course in courses for ms in course.ours)
    all_floor = median(ms for course in courses for ms in course.floor)
    one = median(ms for course in courses for ms in course.blob)
    commits = courses[0].commits
    note = f"floor: the same commands in {commits} bare MULTI/EXECs ({commits} RPUSHs of as many bytes: {one:.2f} ms)"
    rows = [Row("durable overhead per turn", all_ours, all_floor, "ms", Bar("ratio", most=2), f"{note}; {OTHERS}")]
    rows += [
        Row(f"  at turn {turn}", ours[turn], floor[turn], "ms", note=f"{bytes_[turn]:.0f} B of AOF") for turn in at
    ]
    last = at[-1]
    note = f"floor: turn {at[0]}"
    rows.append(
        Row(f"turn {last} against turn {at[0]}, time", ours[last], ours[at[0]], "ms", Bar("ratio", most=1.3), note)
    )
    rows.append(
        Row(f"turn {last} against turn {at[0]}, bytes", bytes_[last], bytes_[at[0]], "B", Bar("ratio", most=1.3), note)
    )
    return rows


def one_turn_tasks(place: Place, number: int) -> None:
    """So many attempts at one-turn tasks in this process, each with a client of its own as in a work-horse: what a
    worker does but for RQ. For the profile."""
    store = open_store(place.settings, place.own_client())
    runtime = Runtime(place.settings, make_toolbox=lambda _: tools.toolbox())
    with tools.in_this_process():
        for n in range(number):
            store.create(NewTask(f"profiled{n}", tools.text_of_task(1), place.settings.queue))
            runtime.attempt(f"profiled{n}", 1)


def one_long_task(place: Place, turns: int) -> None:
    """A task of so many turns in this process. For the profile."""
    _run(place, "profiled", turns, _Plain())


@dataclass
class _Course:
    """What each turn cost, from the first: ms and bytes of the append-only log (only around the turns of interest)."""

    commits: int
    ours: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    blob: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)

    def around(self, turn: int, values: Sequence[float]) -> list[float]:
        return [one for one in values[max(0, turn - 1 - WINDOW) : turn + WINDOW] if one >= 0]


def _course(place: Place, turns: int, at: Sequence[int]) -> _Course:
    place.empty()
    script = _commits_of_a_turn(place)
    course = _Course(len(script))
    model = _Metered(place, course, script, {near for turn in at for near in range(turn - WINDOW, turn + WINDOW + 1)})
    _run(place, "measured", turns + 1, model)
    return course


class _Plain:
    """The scripted model as an object."""

    respond = tools.respond


class _Metered(_Plain):
    """A turn is the time between two questions. While it is asked it measures the floor, so that both see the same
    disk and the same neighbours."""

    def __init__(self, place: Place, course: _Course, script: Sequence[Sequence[Command]], near: set[int]) -> None:
        self.client: Any = place.own_client()
        self.course = course
        self.script = script
        self.near = near
        self.sizes = [sum(_bytes_of(command) for command in commit) for commit in script]
        self.left = self.wrote = 0.0

    def respond(
        self, request: dict[str, Any], messages: Sequence[dict[str, Any]], *, watch: Callable[[], None]
    ) -> Response:
        now, turn = time.perf_counter(), len(messages) // 2
        if turn:
            self.course.ours.append((now - self.left) * 1000)
            self.course.written.append(self._log_bytes() - self.wrote if turn in self.near else -1)
        self.course.floor.append(_timed_ms(self._bare))
        self.course.blob.append(_timed_ms(self._blobs))
        answer = tools.respond(self, request, messages, watch=watch)
        self.wrote = self._log_bytes() if turn + 1 in self.near else 0
        self.left = time.perf_counter()
        return answer

    def _bare(self) -> None:
        for commit in self.script:
            pipe = self.client.pipeline(transaction=True)
            for command in commit:
                pipe.execute_command(*command)
            pipe.execute()

    def _blobs(self) -> None:
        for number in self.sizes:
            pipe = self.client.pipeline(transaction=True)
            pipe.rpush("bench:blobs", b"x" * number)
            pipe.execute()

    def _log_bytes(self) -> int:
        return int(self.client.info("persistence")["aof_current_size"])


def _timed_ms(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1000


def _run(place: Place, name: str, turns: int, model: Any, made: Callable[[Store], Store] = lambda store: store) -> None:
    def make_store(settings: Settings) -> Store:
        return made(open_store(settings, place.own_client()))

    make_store(place.settings).create(
        NewTask(name, tools.text_of_task(turns), place.settings.queue, turns_max=turns + 1)
    )
    runtime = Runtime(
        place.settings, make_model=lambda _: model, make_toolbox=lambda _: tools.toolbox(), make_store=make_store
    )
    said = runtime.attempt(name, 1)
    if said != "succeeded":
        raise RuntimeError(f"the bench's own task came to nothing: {said}")


def _commits_of_a_turn(place: Place) -> list[list[Command]]:
    """The commands inside each MULTI/EXEC of the third turn of a task, with other keys."""
    taken: list[tuple[int, list[Command]]] = []
    model = _Counting()

    def made(store: Store) -> Store:
        _record(store.client, lambda commands: taken.append((model.asked, commands)))
        return store

    _run(place, "recorded", 5, model, made)
    # Renewals of the lease come at their own time; what a turn writes moves its checkpoint.
    taken = [(asked, commands) for asked, commands in taken if any(":checkpoint" in str(part) for part in commands[-1])]
    found = [
        [tuple(_renamed(part) for part in command) for command in commands] for asked, commands in taken if asked == 3
    ]
    if not found:
        raise RuntimeError("no commit of the store was seen: does it still go through a pipeline?")
    return found


class _Counting(_Plain):
    asked = 0

    def respond(self, *args: Any, **options: Any) -> Response:
        self.asked += 1
        return tools.respond(self, *args, **options)


def _record(client: redis.Redis, take: Callable[[list[Command]], None]) -> None:
    make = client.pipeline

    def pipeline(*args: Any, **options: Any) -> Any:
        pipe: Any = make(*args, **options)
        execute = pipe.execute

        def recorded(*args: Any, **options: Any) -> Any:
            take([command for command, _ in pipe.command_stack])
            return execute(*args, **options)

        pipe.execute = recorded
        return pipe

    client.pipeline = pipeline  # type: ignore[method-assign]


def _renamed(part: Any) -> Any:
    return part.replace("recorded", "floor") if isinstance(part, str) else part


def _bytes_of(command: Command) -> int:
    return sum(len(part if isinstance(part, bytes) else str(part).encode()) for part in command)
