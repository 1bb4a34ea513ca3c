"""`enqueue_many`: thousands of tasks at a fraction of what one by one costs, with the same promises for each."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import redis

from enqueue.api import TaskHandle, _store, _Telling
from enqueue.request import new_task
from enqueue.trouble import in_words
from worker.errors import InvalidInput, RedisUnavailable, StorageRefused
from worker.settings import Settings
from worker.settings import settings as settings_of_process
from worker.state.task import NewTask

OPTIONS = frozenset(inspect.signature(new_task).parameters) - {"settings"}


def enqueue_many(
    asked: Iterable[str | Mapping[str, Any]],
    *,
    settings: Settings | None = None,
    client: redis.Redis | None = None,
    **options: Any,
) -> list[TaskHandle]:
    """Have all of these done; handles in the same order. Each is a text, or a mapping with `text` and what else
    `enqueue_task` takes. `options` are those of `enqueue_task`, for every task that does not say otherwise.

    All are checked before the first is enqueued. Each task is stored together with its RQ job or not at all, a
    hundred to a transaction. An existing id is never overwritten: the same request under it is the same task, so
    that repeating a call whose outcome is unknown is safe if each request has a `task_id` (`enqueue.ids.new_id`).

    Raises InvalidInput, with the place of the request (from 0) and nothing enqueued; TaskConflict, StorageRefused
    and RedisUnavailable, when earlier ones may have been accepted.
    """
    if isinstance(asked, str | bytes | Mapping):
        raise InvalidInput("the requests must be a list of them, not a single one")
    settings = settings or settings_of_process()
    news = [_checked(settings, place, one, options) for place, one in enumerate(asked)]
    store = _store(settings, client)
    told: list[str] = []
    store.writes = _Telling(store.keys, store.writes.dispatcher, store.policy.retention_s, told.append)
    try:
        created = store.create_many(news)
    except (RedisUnavailable, StorageRefused) as error:
        why = in_words(error, settings.redis_url) if isinstance(error, RedisUnavailable) else error
        what = "nothing was enqueued"
        if told:
            what = f"some of {len(news)} tasks may have been accepted; asking again with the same task ids is safe"
        raise type(error)(f"{what}: {why}") from error
    return [TaskHandle(one.task_id, one.existed, store, settings.redis_url) for one in created]


def _checked(settings: Settings, place: int, one: str | Mapping[str, Any], options: Mapping[str, Any]) -> NewTask:
    about = {"text": one} if isinstance(one, str) else one
    if not isinstance(about, Mapping) or "text" not in about:
        raise InvalidInput(f"request {place} is neither a text nor a mapping with `text`")
    about = {**options, **about}
    if unknown := sorted(map(str, about.keys() - OPTIONS)):
        raise InvalidInput(f"request {place}: unknown {', '.join(unknown)[:200]}")
    try:
        return new_task(settings, **about)
    except InvalidInput as error:
        raise InvalidInput(f"request {place}: {error}") from None
