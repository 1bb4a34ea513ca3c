"""Keeps a lease alive from its own thread over its own connection, and notices its loss and a cancel.

The runner's thread never waits for this one, and no lock or connection is shared with it.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from worker.errors import LeaseLost, RedisUnavailable, StorageRefused
from worker.log import event
from worker.state.lease import Holder
from worker.state.store import Store

log = logging.getLogger(__name__)


class Heartbeat:
    """Renews every third of the lease's ttl while the `with` block runs. `store` must have a client of its own."""

    def __init__(self, store: Store, holder: Holder) -> None:
        self._store = store
        self._holder = holder
        self._period_s = holder.lease_ttl_s / 3
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{holder.task_id}", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        # Bounded: a renewal may be waiting for a Redis that does not answer, and the task's end must not.
        self._thread.join(timeout=self._period_s)

    def _beat(self) -> None:
        try:
            self._renew_until_over()
        finally:
            self._store.client.close()

    def _renew_until_over(self) -> None:
        pause = self._period_s
        while not self._over.wait(pause):
            pause = self._period_s
            known = self._holder.stop.is_set()  # lost, or let go of: whoever found out or did it says so
            try:
                self._store.renew(self._holder)
            except LeaseLost as lost:
                if not known and not self._over.is_set():
                    event(log, "lease-lost", level=logging.WARNING, task=self._holder.task_id, why=lost)
                return
            except (RedisUnavailable, StorageRefused) as error:
                # The holder's own bound decides how long this may go on.
                event(log, "renewal-failed", level=logging.WARNING, task=self._holder.task_id, why=error)
                pause = self._period_s / 5
