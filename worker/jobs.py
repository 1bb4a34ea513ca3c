"""The names RQ stores. Tiny, so that finding them costs a worker nothing; everything else is imported inside."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def run_task(task_id: str, delivery: int) -> str:
    """Look at a task and run it if it is ours to run. What it returns is for people who read RQ's dashboard."""
    from worker.horse import kept, listen_in_stock_horse
    from worker.settings import settings

    stock = listen_in_stock_horse(settings)  # first: until then a SIGTERM kills

    from functools import partial

    from worker import lookout
    from worker.children import children_end_with_us, end_left_behind
    from worker.crashpoints import check_crash_after
    from worker.dispatch import forked_by, open_store, told_to_go
    from worker.log import show_events
    from worker.process import die_with_parent
    from worker.runtime import Runtime
    from worker.state.lease import Holder

    show_events()
    check_crash_after()
    if (parent := forked_by()) is not None:
        die_with_parent(parent)
    lookout.tidy_up()

    def keep(holder: Holder) -> Any:
        if holder.attempt > 1:  # what an earlier holder has left running here ends before we go on
            end_left_behind()
        store = open_store(settings())
        told = told_to_go(store.client) if stock else None
        return kept(store, holder, settings(), told, forked=parent is not None)

    runtime = Runtime(settings(), keep=keep, require_fit=partial(lookout.require_fit, settings()))
    with children_end_with_us(only_ours=parent is not None):
        return runtime.attempt(task_id, delivery)


def stopped(job: Any, connection: Any) -> None:
    """RQ's `on_stopped`: somebody stopped the job (`send_stop_job_command`, rq-dashboard), and its work-horse is dead.
    The task ends as cancelled; unless it has moved on to another delivery, for then this job was an old one."""
    from worker.children import end_left_behind
    from worker.dispatch import STOPPED_BY, open_store, parts_of
    from worker.errors import TaskNotFound, WrongState
    from worker.log import event
    from worker.process import is_gone
    from worker.settings import settings
    from worker.state.views import Views

    end_left_behind()
    store = open_store(settings())
    views, (task_id, delivery) = Views(store.client, store.keys), parts_of(job.id)
    try:
        if views.task(task_id).delivery != delivery:
            return
        store.cancel(task_id, by=STOPPED_BY)
        running = views.holder_of(task_id)
        if running and is_gone(running.owner):  # else the lease says when it is over
            store.recover(task_id, proof=f"its work-horse was {STOPPED_BY}", fence=running.fence, drained=True)
    except (TaskNotFound, WrongState) as over:
        event(log, "not-stopped", task=task_id, why=over)
    finally:
        store.client.close()
