"""Takes one protection away, to show that a drill notices.

For the processes of a drill only, and nothing else leads here: no setting, no variable of a worker. It refuses to
change anything unless the Redis that this process is pointed at carries the secret of the drill that started it.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import redis

from ops.drill.nursery import NONCE_KEY, NONCE_VARIABLE
from ops.processes import client as retryless_client
from worker.answers import Answers
from worker.drain import Drain
from worker.errors import BatonError
from worker.fleet import ForkWorker
from worker.reconcile import Decision
from worker.settings import Settings
from worker.state import load
from worker.state.guards import Guards
from worker.state.lease import Holder
from worker.state.ledger import Call
from worker.state.store import Store
from worker.sweeper import Sweeper, SweepReport
from worker.tools import Tool, ToolResult


class SabotageRefused(BatonError):
    """This is no process of a drill: nothing was changed."""

    exit_code = 2


def take_away(name: str, settings: Settings) -> None:
    """Switch the protection off in this process and in all it forks. Raises SabotageRefused."""
    _require_drill(settings.redis_url)
    SABOTAGES[name]()


def _require_drill(url: str) -> None:
    secret = os.environ.get(NONCE_VARIABLE, "")
    try:
        with closing(retryless_client(url)) as client:
            found = client.get(NONCE_KEY)
    except redis.RedisError as error:
        raise SabotageRefused(f"no drill's server answers: {error}") from error
    if not secret or not isinstance(found, bytes) or not hmac.compare_digest(found, secret.encode()):
        raise SabotageRefused(SabotageRefused.__doc__ or "")


def _fence() -> None:
    """A holder does not look whether it still is one: neither at the fence, nor at its own clock, nor at `seq`, each of
    which would tell it."""
    Guards._require_fence = lambda self, holder, fence: None  # type: ignore[method-assign]
    Holder._in_doubt = lambda self: False  # type: ignore[method-assign]
    _seq()


def _seq() -> None:
    """Whatever step the checkpoint is at, the holder takes it for the one it left."""
    commit = Guards._commit

    def commit_anyway(self: Guards, holder: Holder, *args: Any, **options: Any) -> None:
        stored: Any = self._get_seq(holder.task_id)  # type: ignore[attr-defined]
        holder.seq = int(stored or 0)
        commit(self, holder, *args, **options)

    def get_seq(self: Guards, task_id: str) -> Any:
        for _ in range(200):
            try:
                return self.client.hget(self.keys.checkpoint(task_id), "seq")
            except redis.RedisError:  # away for a moment
                self.clock.sleep(0.05)
        raise redis.ConnectionError("the server stayed away")

    Guards._get_seq = get_seq  # type: ignore[attr-defined]
    Guards._commit = commit_anyway  # type: ignore[method-assign]


def _marker() -> None:
    """A call leaves no trace that it may have run."""
    Store.mark_started = lambda self, holder, call, effect="": None  # type: ignore[method-assign]


def _ledger() -> None:
    """What was recorded is not found after a crash."""
    calls = load._calls

    def without_entries(*args: Any) -> load.Calls:
        return replace(calls(*args), entries={})

    load._calls = without_entries  # type: ignore[assignment]


def _order() -> None:
    """A result is recorded before there is one."""

    def recorded_before_run(self: Answers, call: Call, tool: Tool, decision: Decision) -> ToolResult:
        result = self._record(call, ToolResult(f"{call.name} is as good as done"), decision)
        tool.run(call.input, self._context_for(call, tool))
        return result

    Answers._run = recorded_before_run  # type: ignore[method-assign]


def _sweeper() -> None:
    """Nobody hands on what a dead worker held."""
    Sweeper.sweep_once = lambda self: SweepReport()  # type: ignore[method-assign]
    ForkWorker._hand_on = lambda self, task_id, horse_pid, status: None  # type: ignore[method-assign]


def _no_drain() -> None:
    Drain.ask = lambda self, why, grace_s: None  # type: ignore[method-assign]


SABOTAGES: dict[str, Callable[[], None]] = {
    "fence": _fence,
    "marker": _marker,
    "ledger": _ledger,
    "order": _order,
    "sweeper": _sweeper,
    "seq": _seq,
    "drain": _no_drain,
}
