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
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import redis

from worker.errors import LeaseLost, RedisUnavailable, StorageRefused
from worker.log import event
from worker.state.lease import Holder
from worker.state.store import Store

log = logging.getLogger(__name__)

CUT_PAUSE_S = 0.05


class Line:
    """The one connection of `client`, listened to while nothing is asked, so that its end is heard at once; and a bell
    for other threads of this process. All but `ring` is for the thread that asks."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        self._connection: socket.socket | None = None

    def ring(self) -> None:
        """End the `rest` that goes on, or the next one."""
        with suppress(OSError):  # full: it has been rung often enough; or closed
            self._bell.send(b".")

    def answered(self) -> bool:
        """To be called after each answer: whether it came over another connection than the one before."""
        before, self._connection = self._connection, self._socket()
        return self._connection is not None and self._connection is not before

    def failed(self) -> None:
        """To be called when no answer came: there is nothing to listen to until one does."""
        self._connection = None

    def rest(self, pause_s: float | None) -> bool:
        """Until the pause (None: endless) is over, the bell rings, or the connection is cut: whether it is."""
        with selectors.DefaultSelector() as selector:  # select() refuses descriptors from 1024 on
            for one in filter(None, (self._ear, self._connection)):
                selector.register(one, selectors.EVENT_READ)
            heard = [key.fileobj for key, _ in selector.select(pause_s)]
        if self._ear in heard:
            with suppress(OSError):
                self._ear.recv(4096)
        return self._connection in heard  # nobody sends us anything unasked: this is its end

    def close(self) -> None:
        self._ear.close()
        self._bell.close()

    def _socket(self) -> socket.socket | None:
        """Of the pool's one connection, which nobody else uses; None while there is none."""
        pool: Any = self._client.connection_pool
        try:
            connection = pool.get_connection()  # an idle one that was cut is connected anew
        except (redis.RedisError, OSError):
            return None
        try:
            found = getattr(connection, "_sock", None)
            return found if isinstance(found, socket.socket) else None  # fakeredis has none
        finally:
            pool.release(connection)


class Heartbeat:
    """Renews every third of the lease's ttl while the `with` block runs. `store` must have a client of its own.
    `beside`: is called in the heartbeat's thread after each renewal, and as often once the lease is lost."""

    def __init__(self, store: Store, holder: Holder, beside: Callable[[], None] | None = None) -> None:
        self._store = store
        self._holder = holder
        self._beside = beside
        self._period_s = holder.lease_ttl_s / 3
        self._over = threading.Event()
        self._line = Line(store.client)
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{holder.task_id}", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._line.ring()
        # Bounded: a renewal may be waiting for a Redis that does not answer, and the task's end must not.
        self._thread.join(timeout=self._period_s)

    def ring(self) -> None:
        """Renew now, and so learn of a cancel. May be called in a signal handler."""
        self._line.ring()

    def _beat(self) -> None:
        try:
            self._renew_until_over()
        finally:
            self._store.client.close()
            self._line.close()

    def _renew_until_over(self) -> None:
        failures = 0
        while not self._over.is_set():
            pause = self._period_s
            known = self._holder.stop.is_set()  # whoever found out says so
            try:
                self._store.renew(self._holder)
            except LeaseLost as lost:
                with self._holder.writing:  # it may just be letting go, in Redis but not yet here
                    known = known or self._holder.released
                if not known and not self._over.is_set():
                    event(log, "lease-lost", level=logging.WARNING, task=self._holder.task_id, why=lost)
                while self._beside is not None and not self._over.wait(self._period_s):
                    self._beside()  # what runs on may hang, and has to be seen doing so
                return
            except (RedisUnavailable, StorageRefused) as error:
                # The holder's own bound decides how long this may go on.
                event(log, "renewal-failed", level=logging.WARNING, task=self._holder.task_id, why=error)
                self._line.failed()
                pause, failures = min(self._period_s / 5, CUT_PAUSE_S * 2**failures), min(failures + 1, 20)
            else:
                failures = 0
                if self._line.answered():
                    pause = CUT_PAUSE_S  # renew once more: the number that was written down may be the old one's
            if self._beside is not None:
                self._beside()
            if self._line.rest(pause):
                self._over.wait(CUT_PAUSE_S)
