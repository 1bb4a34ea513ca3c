"""What a work-horse, forked for one task, hears from outside while it works.

SIGTERM    let go of the task at the next safe point: this process is to end (worker.drain)
SIGUSR1    renew the lease now, and so learn of a cancel (sent by `ForkWorker` alone)

A stock `rq worker` that is told to end waits for its horse and does not tell it: its horse asks, beside each renewal.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import redis

from worker import drain
from worker.heartbeat import Heartbeat
from worker.settings import Settings
from worker.state.lease import Holder
from worker.state.store import Store
from worker.stuck import Bounds, Watchdog, end_horse

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})

_beating: list[Heartbeat] = []  # the one of this process; a signal handler has to find it


def listen(settings: Settings) -> None:
    """Handle the signals in this process, which was just forked with all of SIGNALS blocked, so that none was lost and
    none has ended it."""
    drain.begin_anew()
    _beating.clear()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker
    signal.signal(signal.SIGTERM, _let_go(settings.drain_grace_s))
    signal.signal(signal.SIGUSR1, _ring)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def listen_in_stock_horse(settings: Callable[[], Settings]) -> bool:
    """The same for the horse of a stock worker, which SIGTERM would kill; False if this is none."""
    main = threading.current_thread() is threading.main_thread()
    if not main or "RQ_WORKER_ID" not in os.environ or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    drain.begin_anew()
    _beating.clear()
    signal.signal(signal.SIGTERM, lambda number, frame: drain.PROCESS.ask("SIGTERM", settings().drain_grace_s))
    return True


def kept(
    store: Store, holder: Holder, settings: Settings, told_to_go: Callable[[], bool] | None, *, forked: bool = False
) -> Heartbeat:
    """Keeps the holder's lease (`store`: with a client of its own). `told_to_go`: is its worker to end? `forked`: this
    process was, for this task alone, and may be ended with it."""

    def look() -> None:
        with suppress(redis.RedisError, OSError):
            if told_to_go is not None and told_to_go():
                drain.PROCESS.ask("its worker is to end", settings.drain_grace_s)

        watchdog.look(holder)

    watchdog = Watchdog(store, Bounds.of(settings), end_horse if forked else None)
    heartbeat = Heartbeat(store, holder, look)
    _beating[:] = [heartbeat]
    return heartbeat


def _let_go(grace_s: float) -> Callable[[int, object], None]:
    return lambda number, frame: drain.PROCESS.ask("its worker is to end", grace_s)


def _ring(number: int, frame: object) -> None:
    for heartbeat in _beating:
        heartbeat.ring()
