"""Claim a task and run an attempt at it. Wires settings, store, model, toolbox; `worker.attempt` does the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from worker.attempt import Attempt
from worker.crashpoints import crash_point
from worker.dispatch import open_store
from worker.errors import TaskFailed, WrongState
from worker.heartbeat import Heartbeat
from worker.log import event
from worker.process import this_process
from worker.settings import Settings
from worker.state.lease import Holder
from worker.state.standing import Refused
from worker.state.store import Store
from worker.state.task import Status
from worker.tools import Toolbox, load_toolbox

if TYPE_CHECKING:
    from worker.model import Model

log = logging.getLogger(__name__)


def default_model(settings: Settings) -> Model:
    from worker.model import Claude  # late: it imports anthropic, and the task is owned and its lease kept by now

    return Claude(settings)


class Runtime:
    """What every attempt needs. `make_model` is called after the claim; each `make_store` opens its own connection.
    `keep`: keeps a holder's lease alive while its block runs; by default each has a thread of its own for it.
    `require_fit`: raises ServerUnfit; by default it looks at the server each time."""

    def __init__(
        self,
        settings: Settings,
        *,
        make_model: Callable[[Settings], Model] = default_model,
        make_toolbox: Callable[[Settings], Toolbox] = lambda settings: load_toolbox(settings.tool_modules, settings),
        make_store: Callable[[Settings], Store] = open_store,
        keep: Callable[[Holder], AbstractContextManager[object]] | None = None,
        require_fit: Callable[[Store], None] | None = None,
    ) -> None:
        self.settings = settings
        self.make_model = make_model
        self.make_toolbox = make_toolbox
        self.make_store = make_store
        self.keep = keep or self._own_heartbeat
        self.require_fit = require_fit or self._require_fit

    def attempt(self, task_id: str, delivery: int) -> str:
        """Run a delivery; returns what came of it, in words. Raises TaskFailed for a task that ended as failed, so
        that RQ shows its job as failed, and whatever is no fault of the task (Redis away or unfit, a bug of ours)."""
        store = self.make_store(self.settings)
        self.require_fit(store)
        claimed = store.claim(task_id, delivery, this_process())
        if isinstance(claimed, Refused):
            return _refused(store, task_id, delivery, claimed)
        event(log, "claimed", task=task_id, delivery=delivery, attempt=claimed.attempt, fence=claimed.fence)
        crash_point("after-claim")
        with self.keep(claimed):
            return Attempt(self, store, claimed).run()

    def _require_fit(self, store: Store) -> None:
        store.require_fit(force=self.settings.allow_eviction)

    def _own_heartbeat(self, holder: Holder) -> Heartbeat:
        return Heartbeat(self.make_store(self.settings), holder)


def _refused(store: Store, task_id: str, delivery: int, refused: Refused) -> str:
    """Quiet, so that it shows as no failed job; unless the claim ended the task, or somebody pressed "requeue" on the
    last job of an ended one."""
    event(log, "not-claimed", task=task_id, delivery=delivery, why=refused.why)
    if refused.ended:
        raise TaskFailed(f"task {task_id} failed: {refused.why}")
    ended_badly = refused.current and refused.status in (Status.FAILED, Status.DEAD)
    if ended_badly and store.writes.dispatcher.requeued_by_hand(task_id, delivery, refused.queue):
        try:
            number = store.retry(task_id, by="requeued in rq-dashboard")
        except WrongState as error:  # somebody else has just retried it
            return f"nothing to do: {error}"
        return f"{refused.why}, and its job was requeued by hand: retried as delivery {number}"
    return f"nothing to do: {refused.why}"
