"""A holder: one process's ownership of one task, and the end of it."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field

from worker.clock import Clock
from worker.errors import CancelRequested, LeaseLost
from worker.state.budget import Open


def new_token() -> str:
    """Random for each claim: never host:pid, which a restarted container repeats."""
    return secrets.token_hex(8)


def epoch_number(fence: bytes | str | None) -> int:
    """The n of `n:token`; 0 before the first claim."""
    if not fence:
        return 0
    text = fence.decode() if isinstance(fence, bytes) else fence
    return int(text.partition(":")[0])


@dataclass
class Holder:
    """Who holds a task. `fence` is `n:token`; `seq` the number of the last commit it knows of.

    `check()` is the holder's own bound: it trusts its lease only as long as a renewal it *sent* less than
    the lease's ttl (less a margin) ago was answered, by its own monotonic clock.

    Of the budgets it knows: `scopes_all`, every scope its task is in; `scopes`, those with a budget, as last seen;
    `open`, what is reserved under its task's name; `granted`, that this is for its next call; `calling`, that the call
    has begun, so that it may have to be paid for.
    """

    task_id: str
    fence: str
    delivery: int
    attempt: int
    clock: Clock
    lease_ttl_s: float
    margin_s: float
    seq: int = 0
    cancel: str | None = None
    beat: str = ""  # the connection that keeps the lease, as it was last written down; the heartbeat's own
    released: bool = False  # let go of by ourselves
    scopes_all: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    open: Open | None = None
    granted: bool = False
    calling: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    writing: threading.Lock = field(default_factory=threading.Lock)
    _lost: str | None = None
    _confirmed: float = 0.0
    # By its own clock: the claim or the latest commit, and the one of these that was warned of (worker.stuck).
    progressed_at: float = field(init=False, repr=False)
    warned_of: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.progressed_at = self.clock.monotonic()

    @property
    def epoch(self) -> int:
        return epoch_number(self.fence)

    @property
    def covered(self) -> bool:
        """The next model call may begin, as far as budgets are concerned."""
        return self.granted if self.scopes else True

    def confirm(self, sent_at: float) -> None:
        """A renewal sent at `sent_at` (monotonic seconds) was answered."""
        self._confirmed = max(self._confirmed, sent_at)

    def lose(self, why: str) -> LeaseLost:
        """Note that the ownership is gone and return the exception to raise. The first reason stays."""
        self._lost = self._lost or why
        self.stop.set()
        return LeaseLost(f"task {self.task_id}, fence {self.fence}: {self._lost}")

    def ask_to_cancel(self, why: str) -> None:
        self.cancel = why
        self.stop.set()

    def check(self) -> None:
        """Raise LeaseLost if the ownership is gone or in doubt."""
        if self._lost:
            raise self.lose(self._lost)
        if self._in_doubt():
            raise self.lose("out of touch with Redis for almost the whole lease")

    def stopping(self) -> bool:
        """Lost, in doubt, or asked to end; for tools, which look just before they act."""
        return self.stop.is_set() or self._in_doubt()

    def _in_doubt(self) -> bool:
        return self.clock.monotonic() > self._confirmed + self.lease_ttl_s - self.margin_s

    def watch(self) -> None:
        """`check`, and raise CancelRequested if a person asked for the end."""
        self.check()
        if self.cancel is not None:
            raise CancelRequested(self.cancel)
