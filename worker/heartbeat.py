"""Keeps a lease alive from its own thread over its own connection, and notices its loss and a cancel.

The runner's thread never waits for this one, and no lock or connection is shared with it. The connection is itself a
sign of life (see `worker.proofs`): the first renewal writes its number down, and between two renewals the thread waits
on the socket, so that it is back under a new number as soon as it is cut.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from types import TracebackType
from typing import Any

import redis

from worker.errors import LeaseLost, RedisUnavailable, StorageRefused
from worker.log import event
from worker.state.lease import Holder
from worker.state.store import Store

log = logging.getLogger(__name__)

CUT_PAUSE_S = 0.05


class Heartbeat:
    """Renews every third of the lease's ttl while the `with` block runs. `store` must have a client of its own."""

    def __init__(self, store: Store, holder: Holder) -> None:
        self._store = store
        self._holder = holder
        self._period_s = holder.lease_ttl_s / 3
        self._over = threading.Event()
        self._ear, self._bell = socket.socketpair()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{holder.task_id}", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._bell.close()
        # Bounded: a renewal may be waiting for a Redis that does not answer, and the task's end must not.
        self._thread.join(timeout=self._period_s)

    def _beat(self) -> None:
        try:
            self._renew_until_over()
        finally:
            self._store.client.close()
            self._ear.close()

    def _renew_until_over(self) -> None:
        last: socket.socket | None = None
        failures = 0
        while not self._over.is_set():
            pause, connection = self._period_s, None
            known = self._holder.stop.is_set()  # whoever found out says so
            try:
                self._store.renew(self._holder)
            except LeaseLost as lost:
                with self._holder.writing:  # it may just be letting go, in Redis but not yet here
                    known = known or self._holder.released
                if not known and not self._over.is_set():
                    event(log, "lease-lost", level=logging.WARNING, task=self._holder.task_id, why=lost)
                return
            except (RedisUnavailable, StorageRefused) as error:
                # The holder's own bound decides how long this may go on.
                event(log, "renewal-failed", level=logging.WARNING, task=self._holder.task_id, why=error)
                pause, failures = min(self._period_s / 5, CUT_PAUSE_S * 2**failures), min(failures + 1, 20)
            else:
                connection, failures = self._connection(), 0
                if connection is not last and connection is not None:
                    pause = CUT_PAUSE_S  # renew once more: the number that was written down may be the old one's
            last = connection
            self._rest(connection, pause)

    def _rest(self, connection: socket.socket | None, pause: float) -> None:
        """Until the pause is over, the block has ended, or the connection is cut."""
        with selectors.DefaultSelector() as selector:  # select() refuses descriptors from 1024 on
            for one in filter(None, (self._ear, connection)):
                selector.register(one, selectors.EVENT_READ)
            heard = [key.fileobj for key, _ in selector.select(pause)]
        if connection in heard:  # nobody sends us anything unasked: this is its end
            self._over.wait(CUT_PAUSE_S)

    def _connection(self) -> socket.socket | None:
        """The socket of the pool's one connection, which nobody else uses; None while there is none."""
        pool: Any = self._store.client.connection_pool
        try:
            connection = pool.get_connection()  # an idle one that was cut is connected anew
        except (redis.RedisError, OSError):
            return None
        try:
            found = getattr(connection, "_sock", None)
            return found if isinstance(found, socket.socket) else None  # fakeredis has none
        finally:
            pool.release(connection)
