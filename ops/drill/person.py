"""The person that a held task waits for. A drill has none, so it answers itself: nobody knows."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ops.drill.arena import Arena
from worker.errors import WrongState
from worker.state.keys import call_field
from worker.state.ledger import Resolution
from worker.state.standing import text
from worker.state.views import Views


def answer_holds(arena: Arena) -> None:
    """Resolve every held call as unknown. Raises what the store raises."""
    client: Any = arena.client
    keys = arena.store.keys
    for member in client.zrangebyscore(keys.index("parked"), "+inf", "+inf"):
        task_id = text(member)
        progress = Views(client, keys).progress(task_id)
        turn = progress["turns"]
        for call in progress["pendingToolUse"] or []:
            name = call_field(turn, call["id"])
            if client.hexists(keys.started(task_id), name) and not client.hexists(keys.ledger(task_id), name):
                with suppress(WrongState):  # already queued again, for another call of the same turn
                    arena.store.resolve(task_id, turn, call["id"], Resolution("report"), "the drill")
                break
