"""`enqueue_task` and `get_task`: the client side for Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import redis
from redis.client import Pipeline

from enqueue.follow import follow
from enqueue.ids import checked_id
from enqueue.request import new_task
from enqueue.trouble import in_words, our_words
from worker.clock import SystemClock
from worker.dispatch import open_store
from worker.errors import InvalidInput, RedisUnavailable, StorageRefused
from worker.settings import Settings
from worker.settings import settings as settings_of_process
from worker.state.store import Store
from worker.state.task import Created, NewTask, Status, Task
from worker.state.transact import connect
from worker.state.views import Event, Views
from worker.state.writes import Writes


@dataclass(frozen=True)
class TaskHandle:
    """A task that was accepted. `existed`: it had been before, and nothing was enqueued now."""

    id: str
    existed: bool
    store: Store = field(repr=False, compare=False)
    url: str = field(repr=False, compare=False)

    @property
    def views(self) -> Views:
        return Views(self.store.client, self.store.keys, self.store.clock)

    def status(self) -> Status:
        """Where it stands. Raises TaskNotFound once it has expired, RedisUnavailable (all of these may)."""
        with our_words(self.url):
            return self.views.status(self.id)

    def task(self) -> Task:
        """Its whole record."""
        with our_words(self.url):
            return self.views.task(self.id)

    @property
    def result(self) -> str | None:
        """The answer; None while there is none. A task that failed may have a partial one: see `status()`."""
        task = self.task()
        return task.result if task.status.ended else None

    def wait(self, timeout_s: float | None = None) -> Task:
        """Its record, once it has ended. Raises TimeoutError; the task goes on. Survives short Redis outages."""
        for _ in self._follow("0", timeout_s):
            pass
        return self.task()

    def events(self, after: str = "0", *, follow: bool = False, timeout_s: float | None = None) -> Iterator[Event]:
        """What happened after the cursor `after` (an event's `cursor`), at most 500; with `follow` until its end."""
        if follow:
            return self._follow(after, timeout_s)
        with our_words(self.url):
            return iter(self.views.events(self.id, after))

    def cancel(self, by: str = "the client") -> Status:
        """End it at once if nobody runs it, else ask. Returns the status it had. Raises WrongState if it has ended."""
        with our_words(self.url):
            return self.store.cancel(self.id, by)

    def _follow(self, after: str, timeout_s: float | None) -> Iterator[Event]:
        clock = SystemClock()
        until = math.inf if timeout_s is None else clock.monotonic() + timeout_s
        with our_words(self.url):
            yield from follow(self.views, self.id, after, until=until, clock=clock)


def enqueue_task(
    text: str,
    *,
    task_id: str | None = None,
    dedupe_key: str | None = None,
    queue: str | None = None,
    model: str | None = None,
    system: str | None = None,
    turns_max: int | None = None,
    tokens_max: int | None = None,
    tools: Iterable[str] | None = None,
    tags: Iterable[str] = (),
    delay_s: float = 0,
    deadline_s: float | None = None,
    concurrency_key: str | None = None,
    concurrency: int | None = None,
    settings: Settings | None = None,
    client: redis.Redis | None = None,
) -> TaskHandle:
    """Have `text` done by the fleet. Returns when Redis has stored the task together with its RQ job.

    `task_id`: the same id with the same request is the same task, so repeating a call whose outcome is unknown is
    safe; with another request it raises TaskConflict. `dedupe_key`: the task that was accepted under that key is
    returned unless it failed, was cancelled or died, or its retention time is over. `tools`: names the task may
    use; None is all of them, an empty list none. `tags`: words to find it by; a budget may apply to each. `deadline_s`:
    it fails if it is not done so long after its acceptance. At most `concurrency` tasks with the same `concurrency_key`
    run at once, in the whole fleet. What is left out comes from the settings (BATON_*), which are read
    once per process. `client`: without `decode_responses`; closed by nobody.

    Raises InvalidInput, TaskConflict, StorageRefused, and RedisUnavailable, whose text says whether the task may have
    been accepted nevertheless.
    """
    settings = settings or settings_of_process()
    new = new_task(
        settings, text, task_id=task_id, dedupe_key=dedupe_key, queue=queue, model=model, system=system,
        turns_max=turns_max, tokens_max=tokens_max, tools=tools, tags=tags, delay_s=delay_s,
        deadline_s=deadline_s, concurrency_key=concurrency_key, concurrency=concurrency,
    )  # fmt: skip
    store = _store(settings, client)
    created = _accepted(store, new, settings.redis_url)
    return TaskHandle(created.task_id, created.existed, store, settings.redis_url)


def get_task(task_id: str, *, settings: Settings | None = None, client: redis.Redis | None = None) -> TaskHandle:
    """The task with this id. Raises InvalidInput, TaskNotFound, RedisUnavailable."""
    settings = settings or settings_of_process()
    handle = TaskHandle(checked_id(task_id), True, _store(settings, client), settings.redis_url)
    handle.status()
    return handle


def _store(settings: Settings, client: redis.Redis | None) -> Store:
    if client is None:
        client = _client(settings)
    elif client.connection_pool.connection_kwargs.get("decode_responses"):
        raise InvalidInput("the client must be made without decode_responses: RQ's jobs are bytes")
    return open_store(settings, client)


@lru_cache(maxsize=8)
def _client(settings: Settings) -> redis.Redis:
    return connect(settings.redis_url)


def _accepted(store: Store, new: NewTask, url: str) -> Created:
    told: list[str] = []
    store.writes = _Telling(store.keys, store.writes.dispatcher, store.policy.retention_s, told.append)
    try:
        return store.create(new)
    except RedisUnavailable as error:
        what = "nothing was enqueued"
        if told:
            again = "asking again with this task id (--task-id) is safe"
            what = f"whether task {new.task_id} was accepted is unknown, {again}"
        raise RedisUnavailable(f"{what}: {in_words(error, url)}") from error
    except StorageRefused as error:
        raise StorageRefused(f"nothing was enqueued: {error}") from error


@dataclass(frozen=True)
class _Telling(Writes):
    """Tells when a create is about to be sent: should Redis go away after that, its outcome is unknown."""

    tell_of: Callable[[str], None]

    def new(self, pipe: Pipeline, new: NewTask, nonce: str, now: int) -> None:
        self.tell_of(new.task_id)
        super().new(pipe, new, nonce, now)
