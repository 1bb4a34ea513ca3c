"""What has to be looked at now and then, and not for each task anew: the server, what dead processes have left here.

When it was last done goes along with a fork (monotonic time is the host's), so a parent that looks spares its
work-horses the look.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from worker.children import end_left_behind
from worker.settings import Settings
from worker.state.store import Store

GOOD_FOR_S = 10.0

_due: dict[str, float] = {}


def now_and_then(what: str, act: Callable[[], object]) -> None:
    """Do it, unless it was done a moment ago. Raises what `act` raises, and then it is due still."""
    now = time.monotonic()
    if now >= _due.get(what, 0.0):
        act()
        _due[what] = now + GOOD_FOR_S


def require_fit(settings: Settings, store: Store | Callable[[], Store]) -> None:
    """Raises ServerUnfit if this server would lose tasks. `store`: or what makes one, should it be needed."""

    def ask() -> None:
        asked = store if isinstance(store, Store) else store()
        try:
            asked.require_fit(force=settings.allow_eviction)
        finally:
            if asked is not store:
                asked.client.close()  # a fork must not inherit it

    now_and_then(f"server {settings.redis_url}", ask)


def tidy_up() -> None:
    """End what processes that are gone have left running on this host."""
    now_and_then("left behind", end_left_behind)
