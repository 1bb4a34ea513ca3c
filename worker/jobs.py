"""The one name RQ stores. Tiny, so that finding it costs a worker nothing; everything else is imported inside."""

from __future__ import annotations


def run_task(task_id: str, delivery: int) -> str:
    """Look at a task and run it if it is ours to run. What it returns is for people who read RQ's dashboard."""
    from worker.crashpoints import check_crash_after
    from worker.log import show_events
    from worker.runtime import Runtime
    from worker.settings import settings

    show_events()
    check_crash_after()
    return Runtime(settings()).attempt(task_id, delivery)
