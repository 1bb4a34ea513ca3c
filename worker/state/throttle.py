"""What an API has told one of us, for all of us: one record per endpoint, shared through Redis.

Each time the API says "wait" a generation begins: nobody asks before `until`, and then not everybody at once. Whoever
waits draws a place; place 0 may ask at `until`, the next two in the step after it, the next four in the one after that.
The places need no release, so nobody who dies with one blocks the others. The record ends by itself once the ramp is
over, and with it every place.

`seen` is the generation (0: none) that a caller saw when it sent its request: what the API says to a request that was
sent before the present generation began is the same news again, and starts no further one.

Nothing here is bound to a task: it is advice. Whoever cannot read it goes on without.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import redis
from redis.client import Pipeline

from worker.clock import Clock
from worker.state.keys import Keys
from worker.state.standing import text
from worker.state.transact import Decision, Settled, Write, transact

FIRST_WAIT_MS = 1_000
STAGES = 10  # after as many steps everybody may ask again
JITTER = 0.1  # on top of a wait, never below it
JITTER_MAX_MS = 5_000
LISTED_MS = 31 * 86_400_000  # longer than any wait the API can ask for
_FIELDS = ("host", "model", "generation", "untilMs", "stepMs", "streak", "told", "proven")


@dataclass(frozen=True)
class Endpoint:
    """What shares one rate limit: base URL, key and model. `digest` names all three, the rest is for people."""

    digest: str
    host: str
    model: str


@dataclass(frozen=True)
class Closed:
    """A record: nobody asks before `until_ms`, afterwards one after the other. Times are ms of the server's clock."""

    host: str
    model: str
    generation: int  # the time it began
    until_ms: int
    step_ms: int
    streak: int  # generations in a row with no answer in between
    told: str
    proven: bool = False  # a request of this generation was answered
    drawn: int = 0  # places taken
    digest: str = ""  # where it is known

    @property
    def over_ms(self) -> int:
        """From here on nobody needs a place."""
        return self.until_ms + STAGES * self.step_ms

    def due_ms(self, place: int) -> int:
        """When the holder of a place may ask: 1, 2, 4 … of them in each step, evenly spread."""
        stage = (place + 1).bit_length() - 1
        if stage >= STAGES:
            return self.over_ms
        return self.until_ms + self.step_ms * stage + self.step_ms * (place + 1 - (1 << stage)) // (1 << stage)

    def gap_ms(self, place: int) -> float:
        """Until the next place is due: room for jitter."""
        return self.step_ms / (1 << min((place + 1).bit_length() - 1, STAGES))

    def in_line(self, now_ms: int) -> int:
        """Places that are taken and not due yet."""
        low, high = 0, self.drawn  # places are due in their order
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.due_ms(middle) > now_ms else (middle + 1, high)
        return self.drawn - low


@dataclass(frozen=True)
class Told:
    """What the API said: `wait_ms` None if it gave no time; `backs_off`: it refused a request, so that one refusal
    after the other doubles the wait; `word` for people."""

    wait_ms: int | None
    word: str
    backs_off: bool = True


class Throttle:
    """Reads and writes the records. Raises what redis-py raises, or RedisUnavailable and StorageRefused."""

    def __init__(self, client: redis.Redis, keys: Keys, clock: Clock, *, step_s: float, wait_max_s: float) -> None:
        self.client: Any = client
        self.keys = keys
        self.clock = clock
        self.step_ms = int(step_s * 1000)
        self.wait_max_ms = int(wait_max_s * 1000)

    def look(self, digest: str) -> tuple[int, Closed | None]:
        """(now, the record if there is one), in one round trip."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.hmget(self.keys.api(digest), _FIELDS)
            pipe.get(self.keys.api_places(digest))
            time, fields, drawn = pipe.execute()
        now = self.clock.server_ms(time)
        return now, _read(fields, drawn, now)

    def tell(self, endpoint: Endpoint, seen: int, told: Told, *, patience_s: float) -> Closed:
        """Write down what the API said to a request sent at generation `seen`; the record as it is then."""
        key, jitter = self.keys.api(endpoint.digest), random.uniform(0, JITTER)

        def decide(replies: list[Any]) -> Decision[Closed]:
            fields, drawn, time = replies
            now = self.clock.server_ms(time)
            found = _read(fields, drawn, now)
            if found is None or found.generation == seen:
                streak = found.streak if found and not found.proven and told.backs_off else 0
                new = self._begin(endpoint, told, now, streak, jitter, after=seen if found else 0)
                return Write(lambda pipe: self._write(pipe, endpoint, new, now), new)
            later = now + (told.wait_ms or 0)
            if later <= found.until_ms:
                return Settled(found)
            longer = replace(found, until_ms=later)
            return Write(lambda pipe: self._prolong(pipe, endpoint.digest, longer), longer)

        reads = [("HMGET", key, *_FIELDS), ("GET", self.keys.api_places(endpoint.digest)), ("TIME",)]
        return transact(self.client, self.clock, [key], reads, decide, patience_s=patience_s)

    def draw(self, digest: str) -> tuple[int, Closed | None, int]:
        """(now, the record, our place in its generation). A place whose answer is lost stays empty."""
        places = self.keys.api_places(digest)
        with self.client.pipeline(transaction=True) as pipe:
            pipe.time()
            pipe.hmget(self.keys.api(digest), _FIELDS)
            pipe.incr(places)
            pipe.pexpire(places, self.step_ms + 1, nx=True)  # the record may have ended a moment ago
            time, fields, drawn, _ = pipe.execute()
        now = self.clock.server_ms(time)
        return now, _read(fields, drawn, now), int(drawn) - 1

    def answered(self, digest: str, generation: int) -> None:
        """A request sent in this generation was answered: the next refusal begins with a short wait again."""
        key = self.keys.api(digest)
        with self.client.pipeline(transaction=True) as pipe:
            pipe.hset(key, "proven", generation)
            pipe.pexpire(key, self.step_ms + 1, nx=True)
            pipe.execute()

    def closed(self) -> tuple[int, list[Closed]]:
        """(now, every record whose ramp is not over)."""
        digests = [text(raw) for raw in self.client.zrange(self.keys.apis(), 0, -1)]
        with self.client.pipeline(transaction=False) as pipe:
            pipe.time()
            for digest in digests:
                pipe.hmget(self.keys.api(digest), _FIELDS)
                pipe.get(self.keys.api_places(digest))
            time, *found = pipe.execute()
        now = self.clock.server_ms(time)
        read = [_read(fields, drawn, now) for fields, drawn in zip(found[::2], found[1::2], strict=True)]
        records = [replace(one, digest=digest) for one, digest in zip(read, digests, strict=True) if one is not None]
        return now, [record for record in records if now < record.over_ms]

    def forget(self, digest: str) -> None:
        """Whatever was said: everybody may ask."""
        with self.client.pipeline(transaction=True) as pipe:
            pipe.delete(self.keys.api(digest), self.keys.api_places(digest))
            pipe.zrem(self.keys.apis(), digest)
            pipe.execute()

    def _begin(self, endpoint: Endpoint, told: Told, now: int, streak: int, jitter: float, *, after: int) -> Closed:
        wait = _longer(told.wait_ms or 0, jitter)
        if told.backs_off:
            streak += 1
            own = _longer(FIRST_WAIT_MS * 2 ** min(streak - 1, 30), jitter)
            wait = max(wait, min(own, self.wait_max_ms))
        began = max(now, after + 1)
        return Closed(endpoint.host, endpoint.model, began, now + wait, self.step_ms, streak, told.word)

    def _write(self, pipe: Pipeline, endpoint: Endpoint, new: Closed, now: int) -> None:
        key, listed = self.keys.api(endpoint.digest), self.keys.apis()
        values = (new.host, new.model, new.generation, new.until_ms, new.step_ms, new.streak, new.told, "")
        fields: Mapping[Any, Any] = dict(zip(_FIELDS, values, strict=True))
        pipe.hset(key, mapping=fields)
        ends = _ends_ms(new)
        pipe.pexpireat(key, ends)
        pipe.set(self.keys.api_places(endpoint.digest), 0, pxat=ends)
        pipe.zremrangebyscore(listed, "-inf", now)
        pipe.zadd(listed, {endpoint.digest: ends})
        pipe.pexpire(listed, LISTED_MS)

    def _prolong(self, pipe: Pipeline, digest: str, longer: Closed) -> None:
        key, ends = self.keys.api(digest), _ends_ms(longer)
        pipe.hset(key, "untilMs", longer.until_ms)
        pipe.pexpireat(key, ends)
        pipe.pexpireat(self.keys.api_places(digest), ends)
        pipe.zadd(self.keys.apis(), {digest: ends})


def _longer(wait_ms: int, jitter: float) -> int:
    """Never shorter than it was asked for."""
    return wait_ms + int(min(wait_ms * jitter, JITTER_MAX_MS))


def _ends_ms(record: Closed) -> int:
    """The record outlives its ramp by the wait itself: whoever is told again right after it is told in a row."""
    return record.over_ms + (record.until_ms - record.generation)


def _read(fields: list[bytes | None], drawn: Any, now_ms: int) -> Closed | None:
    """None for no record, one that is not readable, or one from the future: a clock that was put back must not make
    anybody wait for it."""
    host, model, *numbers, told, proven = fields
    try:
        generation, until, step, streak = (int(text(number)) for number in numbers)
        record = Closed(
            text(host), text(model), generation, until, step, streak, text(told),
            proven=text(proven) == str(generation), drawn=int(drawn or 0),
        )  # fmt: skip
    except ValueError:
        return None
    return record if record.generation <= now_ms + record.step_ms and step > 0 else None
