"""What every worker of ours does before its first task: look at the server, and import what tasks need."""

from __future__ import annotations

import logging
import sys

from worker.dispatch import open_store
from worker.errors import BatonError
from worker.log import event, show_events
from worker.settings import Settings
from worker.settings import settings as settings_of_process
from worker.tools import load_toolbox

log = logging.getLogger(__name__)

_preloaded: list[Settings] = []


def start() -> Settings:
    """Ready for tasks, or the end of this process: a server that would lose them, tools that cannot be loaded."""
    show_events()
    try:
        settings = settings_of_process()  # read here, they are known to each work-horse
        store = open_store(settings)
        store.require_fit(force=settings.allow_eviction)
        event(log, "server", promise=store.promise())
        store.client.close()
        preload(settings)
    except BatonError as error:
        event(log, "worker-refuses", level=logging.ERROR, why=error)
        sys.exit(error.exit_code)
    return settings


def preload(settings: Settings) -> None:
    """Import all that a task's run needs, once. Afterwards nothing loaded is touched by the garbage collector any more,
    so that forked horses share its pages."""
    if settings in _preloaded:  # before this process was forked
        return
    import worker.jobs  # late: whoever only names a class need not pay for it
    import worker.runtime  # noqa: F401
    from worker.model import preload

    load_toolbox(settings.tool_modules, settings)
    preload(settings)
    _preloaded.append(settings)
