"""Redis and its troubles, in words: which server, what is wrong, what to do. Passwords are never part of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from worker.errors import BatonError, RedisUnavailable, StorageRefused
from worker.state.transact import shown_url

# What passes by itself when one waits. Wrong credentials do not, although redis-py files them under ConnectionError.
AWAY = (redis.ConnectionError, redis.TimeoutError)


def in_words(error: Exception, url: str) -> BatonError:
    """What happened between us and Redis, as an error for a person. Takes redis-py's errors and those of
    `worker.state.transact`, whose cause says more than they do."""
    cause = error.__cause__ if isinstance(error, RedisUnavailable) else error
    where = shown_url(url)
    match cause:
        case redis.AuthenticationError():
            return RedisUnavailable(
                f"Redis at {where} refuses our credentials ({cause}); they belong in BATON_REDIS_URL"
            )
        case redis.BusyLoadingError():
            return RedisUnavailable(f"Redis at {where} is still loading its data; try again in a moment")
        case redis.TimeoutError():
            return RedisUnavailable(f"Redis at {where} does not answer in time")
        case redis.ConnectionError():
            return RedisUnavailable(f"no Redis at {where}. Start one with `baton up`, or set BATON_REDIS_URL ({cause})")
        case redis.RedisError():
            return StorageRefused(f"Redis at {where} refuses: {cause}")
        case _:
            return error if isinstance(error, BatonError) else BatonError(str(error))


@contextmanager
def our_words(url: str) -> Iterator[None]:
    """Redis's troubles inside become errors for a person."""
    try:
        yield
    except (redis.RedisError, RedisUnavailable) as error:
        worded = in_words(error, url)
        if worded is error:  # was put into words further down
            raise
        raise worded from error
