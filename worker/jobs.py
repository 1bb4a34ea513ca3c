"""The one name RQ stores. Tiny, so that finding it costs a worker nothing; everything else is imported inside."""

from __future__ import annotations


def run_task(task_id: str, delivery: int) -> str:
    """Look at a task and run it if it is ours to run. What it returns is for people who read RQ's dashboard."""
    from worker.children import children_end_with_us, end_left_behind
    from worker.crashpoints import check_crash_after
    from worker.dispatch import forked_by
    from worker.log import show_events
    from worker.process import die_with_parent
    from worker.runtime import Runtime
    from worker.settings import settings

    show_events()
    check_crash_after()
    if (parent := forked_by()) is not None:
        die_with_parent(parent)
    end_left_behind()
    with children_end_with_us():
        return Runtime(settings()).attempt(task_id, delivery)
