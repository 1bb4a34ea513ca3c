"""Keeps the leases of all tasks of one process, from one thread over one connection.

What `worker.heartbeat` is to one holder, for as many as there are: all are renewed together every third of the lease's
ttl; one that has just begun, a moment after it began, so that the number of our connection (a sign of life, see
`worker.proofs`) is written down without a round trip for each. The lease of one may be lost: the others do not notice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from worker.errors import LeaseLost, RedisUnavailable
from worker.heartbeat import CUT_PAUSE_S, Line
from worker.log import event
from worker.state.lease import Holder
from worker.state.store import Store

log = logging.getLogger(__name__)

NEVER = float("inf")
END_MAX_S = 0.1
FIRST_S = 0.5  # what begins within so long is renewed for the first time together


class Leases:
    """Runs while its `with` block does. `store` must have a client of its own. `look` is called with each holder after
    its renewal, in our thread."""

    def __init__(self, store: Store, look: Callable[[Holder], None] = lambda holder: None) -> None:
        self._store = store
        self._look = look
        self._period_s = store.policy.lease_ttl_ms / 1000 / 3
        self._line = Line(store.client)
        self._lock = threading.Lock()
        self._kept: dict[str, Holder] = {}  # by fence, which no two claims share
        self._soon: dict[str, Holder] = {}  # of these, those that do not wait for the next round
        self._soon_at = self._wakes_at = NEVER
        self._over = False
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def __enter__(self) -> Leases:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over = True
        self._line.ring()
        self._thread.join(timeout=END_MAX_S)  # a renewal may be waiting for a Redis that does not answer

    @property
    def alive(self) -> bool:
        """The thread is there. Without it nobody may claim anything."""
        return self._thread.is_alive()

    @contextmanager
    def keep(self, holder: Holder) -> Iterator[None]:
        """Keep its lease while the block runs."""
        with self._lock:
            self._kept[holder.fence] = holder
        self._want(holder, FIRST_S)
        try:
            yield
        finally:
            with self._lock:
                self._kept.pop(holder.fence, None)
                self._soon.pop(holder.fence, None)

    def renew_now(self, holder: Holder) -> None:
        """Without waiting for the next round: somebody has asked for the end of its task."""
        self._want(holder, 0)

    def _want(self, holder: Holder, within_s: float) -> None:
        at = time.monotonic() + within_s
        with self._lock:
            if holder.fence not in self._kept:
                return
            self._soon[holder.fence] = holder
            self._soon_at = min(self._soon_at, at)
            if at >= self._wakes_at:
                return  # it will be awake by then
            self._wakes_at = at
        self._line.ring()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._renew_until_over()
        finally:
            self._store.client.close()
            self._line.close()

    def _renew_until_over(self) -> None:
        round_at, failures = time.monotonic() + self._period_s, 0
        while not self._over:
            holders, everybody = self._due(round_at)
            if everybody:
                round_at = time.monotonic() + self._period_s
            if holders and self._renew(holders):
                failures = 0
                if self._line.answered():  # the number that was written down may be the old one's
                    round_at = time.monotonic() + CUT_PAUSE_S
            elif holders:
                self._line.failed()
                round_at = time.monotonic() + min(self._period_s / 5, CUT_PAUSE_S * 2**failures)
                failures = min(failures + 1, 20)
            if self._rest(round_at):
                round_at = time.monotonic()

    def _due(self, round_at: float) -> tuple[list[Holder], bool]:
        """(whom to renew now, whether that is everybody)."""
        with self._lock:
            now = time.monotonic()
            everybody = now >= round_at
            due: list[Holder] = []
            if everybody:
                due = list(self._kept.values())
            elif now >= self._soon_at:
                due = list(self._soon.values())
            if everybody or due:
                self._soon.clear()
                self._soon_at = NEVER
        return [holder for holder in due if not holder.released], everybody

    def _renew(self, holders: Sequence[Holder]) -> bool:
        """Whether Redis did it for all of them. A lost one is kept no longer."""
        refused: Exception | None = None
        try:
            results = self._store.renew_all(holders)
        except RedisUnavailable as error:  # the holders' own bounds decide how long this may go on
            results, refused = [], error
        for holder, found in zip(holders, results, strict=False):
            if isinstance(found, LeaseLost):
                with self._lock:
                    self._kept.pop(holder.fence, None)
                self._tell(holder, found)
            elif found is not None:
                refused = found
            else:
                self._look(holder)
        if refused is not None:
            event(log, "renewal-failed", level=logging.WARNING, tasks=len(holders), why=refused)
        return refused is None

    def _tell(self, holder: Holder, lost: LeaseLost) -> None:
        # Whoever holds this lock is just letting go, or is about to find out and say so.
        if holder.writing.acquire(blocking=False):
            released = holder.released
            holder.writing.release()
            if not released:
                event(log, "lease-lost", level=logging.WARNING, task=holder.task_id, why=lost)

    def _rest(self, round_at: float) -> bool:
        """Until a renewal is due or the line is cut: whether it is, so that everybody needs its new number at once."""
        with self._lock:
            self._wakes_at = min(round_at, self._soon_at) if self._kept else NEVER
            if not self._kept:
                self._line.failed()  # nobody's sign of life
            pause = max(0.0, self._wakes_at - time.monotonic())
        cut = self._line.rest(None if pause == NEVER else pause)
        if cut:
            time.sleep(CUT_PAUSE_S)
        return cut
