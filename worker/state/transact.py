"""One WATCH / read / MULTI / EXEC, repeated until its outcome is known.

The client's own retries are off: they run a MULTI twice when only the reply was lost. Here a
lost reply, a WatchError and a refusal that will pass all lead to the same thing: read again, and let `decide`
find out from what is stored whether the change was applied. So every `decide` must recognise its own change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.retry import Retry

from worker.clock import Clock
from worker.errors import InvalidSettings, RedisUnavailable, StorageRefused

T = TypeVar("T")

# Refusals that end by themselves or by an operator's hand; the first word of the server's answer.
PASSING = frozenset(
    {"OOM", "MISCONF", "READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "BUSY", "TRYAGAIN", "CLUSTERDOWN"}
)

# Each conflict means that somebody else got on, so this many in a row is trouble, not bad luck.
CONFLICTS_MAX = 100


@dataclass(frozen=True)
class Settled(Generic[T]):
    """Nothing to write: refused, or found applied."""

    value: T


@dataclass(frozen=True)
class Write(Generic[T]):
    """Queue these writes into the MULTI; `value` is the outcome once EXEC has applied them. `heard` gets EXEC's
    answers, unless they were lost."""

    queue: Callable[[Pipeline], None]
    value: T
    heard: Callable[[list[Any]], None] | None = None


def queued(*command: str) -> Callable[[Pipeline], None]:
    """For a Write of a single command."""

    def queue(pipe: Pipeline) -> None:
        pipe.execute_command(*command)  # type: ignore[no-untyped-call]

    return queue


Decision = Settled[T] | Write[T]
Decide = Callable[[list[Any]], Decision[T]]


def connect(url: str, *, timeout_s: float = 5.0) -> redis.Redis:
    """A client for state: no retries of its own, bytes in and out; opens no connection yet. Never share it with RQ's
    worker. Raises InvalidSettings for what is no URL of a Redis."""
    try:
        return redis.Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            health_check_interval=0,
            driver_info=None,  # else it looks its own version up, and tells the server, for each connection
        )
    except ValueError:  # its text may hold a part of a password that was not %-encoded
        raise InvalidSettings(
            "BATON_REDIS_URL: expected redis://[user:password@]host:port/db, rediss://… or unix:///path?db=0, with "
            "special characters in a password written as %xx"
        ) from None


def shown_url(url: str) -> str:
    """`url` for eyes and logs: without user, password and query (which may hold a password, too)."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "BATON_REDIS_URL"
    who, at, where = rest.rpartition("@")
    return f"{scheme}://{'***@' if at and who else ''}{where.partition('?')[0]}"


def transact(
    client: redis.Redis,
    clock: Clock,
    watch: Sequence[str],
    reads: Sequence[Sequence[str]],
    decide: Decide[T],
    *,
    patience_s: float,
    before_each: Callable[[], None] = lambda: None,
    optional: int = 0,
) -> T:
    """Apply one change and return its outcome; see `patiently`. Whatever `decide` raises passes through. The server
    may refuse the last `optional` of the reads: `decide` then gets the refusal for an answer."""
    return patiently(
        lambda: _once(client, watch, reads, decide, optional), clock, patience_s=patience_s, before_each=before_each
    )  # fmt: skip


def patiently(
    attempt: Callable[[], T], clock: Clock, *, patience_s: float, before_each: Callable[[], None] = lambda: None
) -> T:
    """The outcome of `attempt`, which may be run any number of times.

    `before_each` runs before every try and may raise to give up. Raises RedisUnavailable when there was no
    answer for `patience_s` seconds, StorageRefused when Redis answered and would not do it. An EXEC whose reply
    was lost is always looked after once more, however little patience is left.
    """
    give_up_at = clock.monotonic() + patience_s
    pause, conflicts, lost = 0.005, 0, 0
    while True:
        before_each()
        failure: BaseException
        try:
            return attempt()
        except redis.WatchError as error:
            # Somebody changed it; or the connection broke in EXEC, which redis-py reports in the same way.
            cause = error.__context__
            if isinstance(cause, redis.ConnectionError | redis.TimeoutError):
                failure, lost = cause, lost + 1
            else:
                failure, conflicts = error, conflicts + 1
            again = lost == 1 if failure is cause else conflicts < CONFLICTS_MAX
        except redis.AuthenticationError as error:
            raise RedisUnavailable(f"Redis refuses our credentials: {error}") from error
        except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError) as error:
            if isinstance(error, redis.ResponseError) and error_code(error) not in PASSING:
                raise StorageRefused(f"Redis refused: {error}") from error
            failure, again = error, False
        if not again and clock.monotonic() >= give_up_at:
            raise _gave_up(failure) from failure
        clock.sleep(pause * (0.5 + random.random()))
        pause = min(pause * 2, 0.05 if again else 1.0)


def _gave_up(failure: BaseException) -> RedisUnavailable | StorageRefused:
    if isinstance(failure, redis.ResponseError):
        return StorageRefused(f"Redis refuses to store: {failure}")
    if isinstance(failure, redis.WatchError):
        return StorageRefused(f"others changed the same task {CONFLICTS_MAX} times while we tried to")
    return RedisUnavailable(f"no answer from Redis: {failure}")


def _once(
    client: redis.Redis, watch: Sequence[str], reads: Sequence[Sequence[str]], decide: Decide[T], optional: int
) -> T:
    with client.pipeline() as pipe:
        decision = decide(_look(pipe, watch, reads, optional))
        if isinstance(decision, Settled):
            return decision.value
        pipe.multi()
        decision.queue(pipe)
        answers = pipe.execute()
        if decision.heard is not None:
            decision.heard(answers)
        return decision.value


def _look(pipe: Pipeline, watch: Sequence[str], reads: Sequence[Sequence[str]], optional: int) -> list[Any]:
    """WATCH and all reads in one round trip; the pipeline's own `watch` and each read after it would take one each."""
    connection: Any = pipe.connection_pool.get_connection()
    pipe.connection, pipe.watching = connection, True  # so that it executes on this one, and unwatches it
    try:
        connection.send_packed_command(connection.pack_commands([("WATCH", *watch), *reads]))
        answers = [_answer(connection, refusable=n > len(reads) - optional) for n in range(len(reads) + 1)]
    except BaseException:
        connection.disconnect()  # answers may still be on their way; this connection is of no more use
        pipe.watching = False
        raise
    return answers[1:]


def _answer(connection: Any, *, refusable: bool) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:  # forbidden, renamed away
        if not refusable or error_code(error) in PASSING:
            raise
        return error


def error_code(error: redis.ResponseError) -> str:
    """The first word of the server's answer; redis-py cuts it off for the classes of error it knows."""
    if error.status_code:
        return str(error.status_code)
    # redis-py puts "Command # 3 (SET …) of pipeline caused error: " in front of what a queued command was told.
    return str(error).rpartition("caused error: ")[2].partition(" ")[0]
