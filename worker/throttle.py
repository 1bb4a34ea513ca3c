"""The gate before each model call: when the API has told one task to wait, all of them wait, and none holds a worker.

`through(ask)` runs `ask`, or raises MustWait, with which the attempt parks the task until its place in line is due
(worker.state.throttle has the record and its ramp). The task comes back with its place for a ticket; as long as no
further generation has begun, that lets all calls of the attempt through. The gate only ever gives advice: a Redis that
does not answer, or a record that is gone, leaves it open.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import redis

from worker.errors import ModelTransient, MustWait, RedisUnavailable, StorageRefused
from worker.log import event
from worker.settings import Settings
from worker.state.store import Store
from worker.state.task import ParkNote
from worker.state.throttle import Closed, Endpoint, Throttle, Told

if TYPE_CHECKING:  # importing it costs a second: anthropic
    from worker.model import Response

log = logging.getLogger(__name__)

WAITS_FOR = "api"
SURELY_DUE_MS = 2  # a pause is cut to whole ms on its way
PATIENCE_S = 2.0
_TROUBLE = (redis.RedisError, OSError, RedisUnavailable, StorageRefused)


@runtime_checkable
class Named(Protocol):
    """A model that shares a rate limit with others, and can say which."""

    def endpoint(self, request: dict[str, Any]) -> Endpoint: ...


class Gate:
    """One attempt's. `name` None: a model without an endpoint, always open. `ticket`: what the task was parked with."""

    def __init__(self, throttle: Throttle | None = None, name: Callable[[], Endpoint] | None = None, ticket: str = ""):
        self._throttle = throttle
        self._name = name
        self._endpoint: Endpoint | None = None
        self._generation, self._place = _parsed(ticket)

    def through(self, ask: Callable[[], Response]) -> Response:
        """What `ask` returns. Raises MustWait before it, if it is not our turn, or after it, if the API said so."""
        if self._throttle is None or self._name is None:
            return ask()
        self._endpoint = self._endpoint or self._name()
        seen = self._enter(self._throttle, self._endpoint)
        try:
            response = ask()
        except ModelTransient as fault:
            if fault.throttled:
                self._wait_with_all(self._throttle, self._endpoint, seen, fault)
            raise
        self._tell_of(self._throttle, self._endpoint, seen, response)
        return response

    def _enter(self, throttle: Throttle, endpoint: Endpoint) -> Closed | None:
        """The record that lets us through, if there is one."""
        try:
            now, record = throttle.look(endpoint.digest)
            if record is None or now >= record.over_ms:
                return record
            if record.generation != self._generation:
                now, record = self._draw(throttle, endpoint)
        except _TROUBLE as error:
            event(log, "throttle-unknown", level=logging.WARNING, host=endpoint.host, why=error)
            return None
        if record is not None and now < record.due_ms(self._place):
            raise self._pause(now, record, f"waits for its turn: {_asked(record)}")
        return record

    def _draw(self, throttle: Throttle, endpoint: Endpoint) -> tuple[int, Closed | None]:
        now, record, place = throttle.draw(endpoint.digest)
        if record is not None:
            self._generation, self._place = record.generation, place
        return now, record

    def _wait_with_all(
        self, throttle: Throttle, endpoint: Endpoint, seen: Closed | None, fault: ModelTransient
    ) -> None:
        """Raises MustWait; comes back if nothing could be written down: then the fault speaks for itself."""
        asked_ms = None if fault.retry_after_s is None else int(fault.retry_after_s * 1000) + 1
        try:
            # Between the two somebody else may have been told something newer: the place is of what stands now.
            throttle.tell(endpoint, _generation(seen), Told(asked_ms, fault.said), patience_s=PATIENCE_S)
            now, record = self._draw(throttle, endpoint)
        except _TROUBLE as error:
            event(log, "throttle-unknown", level=logging.WARNING, host=endpoint.host, why=error)
            return
        if record is not None:
            event(log, "throttled", level=logging.WARNING, host=record.host, model=record.model, streak=record.streak,
                  seconds=round((record.until_ms - now) / 1000, 1), why=fault)  # fmt: skip
            named = f" (request {fault.request_id})" if fault.request_id and fault.request_id not in str(fault) else ""
            raise self._pause(now, record, f"the API asks everybody to wait: {fault}{named}") from None

    def _tell_of(self, throttle: Throttle, endpoint: Endpoint, seen: Closed | None, response: Response) -> None:
        """An answer: the API takes requests again, and may have said that this was the last one for a while."""
        try:
            if seen is not None and seen.streak and not seen.proven:
                throttle.answered(endpoint.digest, seen.generation)
            if response.resume_after_s:
                wait_ms = min(int(response.resume_after_s * 1000) + 1, throttle.wait_max_ms)
                told = Told(wait_ms, "a used-up limit", backs_off=False)
                throttle.tell(endpoint, _generation(seen), told, patience_s=PATIENCE_S)
        except _TROUBLE as error:
            event(log, "throttle-unknown", level=logging.WARNING, host=endpoint.host, why=error)

    def _pause(self, now: int, record: Closed, reason: str) -> MustWait:
        spread = random.uniform(0, record.gap_ms(self._place) / 2)
        wait_ms = max(0, record.due_ms(self._place) - now) + spread + SURELY_DUE_MS
        return MustWait(reason, wait_ms / 1000, waits_for=WAITS_FOR, ticket=f"{self._generation}:{self._place}")


def gate_for(store: Store, settings: Settings, model: object, request: dict[str, Any], parked: ParkNote) -> Gate:
    """The gate of an attempt at a task that was parked with that note."""
    if not isinstance(model, Named):
        return Gate()
    named = model
    throttle = throttle_of(store, settings)
    # Whatever it waited for last: only a ticket of this gate's names a generation.
    return Gate(throttle, lambda: named.endpoint(request), parked.ticket)


def throttle_of(store: Store, settings: Settings) -> Throttle:
    """The records of the fleet that the store is of."""
    return Throttle(
        store.client, store.keys, store.clock, step_s=settings.ramp_step_s, wait_max_s=settings.park_max_s
    )  # fmt: skip


def _generation(seen: Closed | None) -> int:
    return seen.generation if seen else 0


def _asked(record: Closed) -> str:
    return f"{record.host} asked everybody to wait ({record.told})"


def _parsed(ticket: str) -> tuple[int, int]:
    generation, _, place = ticket.partition(":")
    return (int(generation), int(place)) if generation.isdigit() and place.isdigit() else (0, 0)
