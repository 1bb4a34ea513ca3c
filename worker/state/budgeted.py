"""The verbs of budgets; `worker.state.budget` says what a budget is.

A commit that leads to a model call reserves along with it, if there seems to be room, and learns from EXEC's own
answers whether every budget was kept: of many that reserve at once, those within the limit are granted and no other.
Who was not, or cannot tell, asks `reserve`, which decides under WATCH. So used and reserved tokens exceed a limit only
by what calls use beyond their estimates.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from redis.client import Pipeline

from worker.errors import MustWait, TaskFault
from worker.state.budget import WAITS, Budget, Open, held, read_budgets
from worker.state.lease import Holder
from worker.state.slots import Slots
from worker.state.standing import text
from worker.state.task import Status, utc
from worker.state.transact import Decision, Settled, Write, queued, transact

BATCH = 500
JITTER_MAX_S = 60.0
JITTER = 0.02  # of a period


class Budgets(Slots):
    """Reserving for one's own calls; making and listing budgets; waking those that wait for one."""

    _looked_at = 0  # how far a sweeper got in the list of those that wait

    # -- by a runner -----------------------------------------------------------------------------------------------

    def reserve(self, holder: Holder, needs: int, turn: int) -> None:
        """Reserve `needs` tokens for the model call after `turn` turns. Charges what a dead holder of this task had
        reserved. Raises MustWait if a budget has no room, LeaseLost."""
        scopes, epoch, task = holder.scopes_all, self.keys.epoch(holder.task_id), self.keys.task(holder.task_id)
        made = Open(needs, holder.epoch, turn, {}, secrets.token_hex(4))
        now = 0

        def decide(replies: list[Any]) -> Decision[Budget | None]:
            nonlocal made, now
            fence, time, raw, *rest = replies
            self._require_fence(holder, text(fence))
            now, stored = self.clock.server_ms(time), Open.load(raw)
            if stored is not None and stored.id == made.id:
                return Settled(None)  # reserved before, only the answer was lost
            budgets = read_budgets(scopes, rest, now)
            charge = stored.amount if stored is not None and stored.epoch != holder.epoch else 0
            then = [_without(one, stored, charge) for one in budgets.values()]
            short = next((one for one in then if one.left < needs), None)
            made = replace(made, scopes={one.scope: one.born for one in then})

            def queue(pipe: Pipeline) -> None:
                if stored is not None:
                    self.purse.close(pipe, holder.task_id, stored, budgets, charge)
                if short is not None:
                    pipe.hset(task, "budgetNeeds", needs)
                elif then:
                    self.purse.reserve(pipe, holder.task_id, made, then)

            return Write(queue, short) if stored is not None or then else Settled(None)

        with holder.writing:
            reads = [("GET", epoch), ("TIME",), ("HGET", task, "budgetOpen"), *self.purse.reads(scopes)]
            short = self._transact_as(holder, [epoch, *map(self.keys.budget, scopes)], reads, decide)
        holder.scopes = tuple(made.scopes)
        holder.granted = short is None
        holder.open = made if short is None and made.scopes else None
        if short is not None:
            raise MustWait(
                _why(short, holder.task_id, needs), _wait_s(short, needs, now), waits_for=f"{WAITS}{short.scope}"
            )  # fmt: skip

    def _commit_and_reserve(
        self, holder: Holder, queue: Callable[[Pipeline, int, list[Any]], None], needs: int, turn: int
    ) -> None:
        """A commit that leads to a model call. A task that no budget applies to pays one command in its reads."""
        scopes = holder.scopes if needs and holder.open is None else ()
        asked = [("SMISMEMBER", self.keys.budgets(), *holder.scopes_all)] if holder.scopes_all else []
        seen, made, kept = list(holder.scopes), list[tuple[Open, list[Budget], int]](), [False]

        def queue_all(pipe: Pipeline, now: int, rest: list[Any]) -> None:
            queue(pipe, now, rest)
            made.clear()
            if asked:
                seen[:] = [scope for scope, there in zip(holder.scopes_all, rest[0], strict=True) if there]
            budgets = list(read_budgets(scopes, rest[1:], now).values()) if scopes else []
            if budgets and all(one.left >= needs for one in budgets):
                open_ = Open.new(needs, holder.epoch, turn, budgets)
                made.append((open_, budgets, len(pipe)))
                self.purse.reserve(pipe, holder.task_id, open_, budgets)

        def heard(answers: list[Any]) -> None:
            kept[0] = any(held(budgets, answers[place:]) for _, budgets, place in made)

        self._commit(holder, queue_all, reads=[*asked, *self.purse.reads(scopes)], heard=heard)
        holder.scopes, holder.granted = tuple(seen), False
        if made:
            holder.open = made[0][0]
            holder.granted = kept[0] and set(seen) <= set(holder.open.scopes)

    # -- by people -------------------------------------------------------------------------------------------------

    def set_budget(self, scope: str, limit: int, period_ms: int) -> list[str]:
        """Make or change a budget; with another period it begins anew. Returns the tasks that were woken for it."""
        key, born = self.keys.budget(scope), secrets.token_hex(4)

        def decide(replies: list[Any]) -> Decision[None]:
            period, there = replies[0]
            fields: dict[Any, Any] = {"limit": limit}

            def queue(pipe: Pipeline) -> None:
                if there is None or int(period or 0) != period_ms:
                    pipe.delete(key)
                    fields.update({"periodMs": period_ms, "born": born})
                pipe.hset(key, mapping=fields)
                pipe.sadd(self.keys.budgets(), scope)

            return Write(queue, None)

        reads = [("HMGET", key, "periodMs", "limit")]
        transact(self.client, self.clock, [key], reads, decide, patience_s=self.policy.patience_s)
        return self._wake_all(scope)

    def clear_budget(self, scope: str) -> list[str] | None:
        """Take a budget away; None if there was none. Returns the tasks that were woken for it."""
        key = self.keys.budget(scope)

        def queue(pipe: Pipeline) -> None:
            pipe.delete(key)
            pipe.srem(self.keys.budgets(), scope)

        def decide(replies: list[Any]) -> Decision[bool]:
            return Write(queue, bool(replies[0]))

        there = transact(
            self.client, self.clock, [key], [("HEXISTS", key, "limit")], decide, patience_s=self.policy.patience_s
        )  # fmt: skip
        return self._wake_all(scope) if there else None

    def _wake_all(self, scope: str) -> list[str]:
        woken: list[str] = []
        for place in range(0, self.client.zcard(self.keys.budget_waiting()), BATCH):
            woken += self._wake_those_with_room(place, scope)
        return woken

    # -- by anybody ------------------------------------------------------------------------------------------------

    def list_budgets(self, scopes: Sequence[str] | None = None) -> list[Budget]:
        """All of them, or those of `scopes` that exist."""
        client: Any = self.client
        wanted = sorted(map(text, client.smembers(self.keys.budgets()))) if scopes is None else list(scopes)
        with client.pipeline(transaction=False) as pipe:
            pipe.time()
            for scope in wanted:
                pipe.hgetall(self.keys.budget(scope))
            time, *replies = pipe.execute()
        return list(read_budgets(wanted, replies, self.clock.server_ms(time)).values())

    def waiting_for_budgets(self, place: int = 0, limit: int = BATCH) -> dict[str, tuple[str, int]]:
        """Tasks that wait for a budget → which one, and how many tokens they need; longest waiting first. Others that
        are still listed are taken off the list."""
        client: Any = self.client
        ids = [text(raw) for raw in client.zrange(self.keys.budget_waiting(), place, place + limit - 1)]
        with client.pipeline(transaction=False) as pipe:
            for task_id in ids:
                pipe.hmget(self.keys.task(task_id), "status", "waitsFor", "budgetNeeds")
            replies = pipe.execute(raise_on_error=False)
        found = [(None, None, None) if isinstance(reply, Exception) else reply for reply in replies]
        waiting = {
            task_id: (text(what).removeprefix(WAITS), int(needs or 0))
            for task_id, (status, what, needs) in zip(ids, found, strict=True)
            if _waits(status, what)
        }
        self._strike_off([task_id for task_id in ids if task_id not in waiting])
        return waiting

    def offer_budgets(self) -> list[str]:
        """For sweepers: wake tasks whose budget has room for them by now. Returns them."""
        woken = self._wake_those_with_room(self._looked_at)
        self._looked_at += BATCH
        if self._looked_at >= int(self.client.zcard(self.keys.budget_waiting())):
            self._looked_at = 0
        return woken

    def _wake_those_with_room(self, place: int, scope: str = "") -> list[str]:
        """Of the batch at `place`, those that wait for `scope`, or for any budget."""
        waiting = self.waiting_for_budgets(place)
        wanted = sorted({what for what, _ in waiting.values() if scope in ("", what)})
        room: dict[str, float] = dict.fromkeys(wanted, float("inf"))  # that of a budget that was taken away
        room |= {one.scope: one.left for one in self.list_budgets(wanted)} if wanted else {}
        woken = []
        for task_id, (what, needs) in waiting.items():
            with suppress(TaskFault):  # a damaged one keeps nobody else waiting
                if needs <= room.get(what, -1) and self.wake(task_id):
                    room[what] -= needs
                    woken.append(task_id)
        return woken

    def _strike_off(self, ids: Sequence[str]) -> None:
        listed = self.keys.budget_waiting()

        def decide(replies: list[Any]) -> Decision[None]:
            over = [task_id for task_id, found in zip(ids, replies, strict=True) if not _waits(*found)]
            return Write(queued("zrem", listed, *over), None) if over else Settled(None)

        if ids:  # one that is parked again in this moment must stay
            keys = [self.keys.task(task_id) for task_id in ids]
            reads = [("HMGET", key, "status", "waitsFor") for key in keys]
            transact(self.client, self.clock, keys, reads, decide, patience_s=self.policy.patience_s)


def _waits(status: bytes | None, what: bytes | None) -> bool:
    return text(status) == Status.PARKED and text(what).startswith(WAITS)


def _without(one: Budget, stored: Open | None, charge: int) -> Budget:
    """As it will be once what was stored is closed."""
    if stored is None or one.scope not in stored.scopes:
        return one
    back = stored.amount if stored.scopes[one.scope] == one.born else 0
    return replace(one, reserved=max(one.reserved - back, 0), used=one.used + charge)


def _wait_s(short: Budget, needs: int, now_ms: int) -> float | None:
    """Until the period is over, and not all at once; None: only a person can help."""
    if short.anew_ms is None or needs > short.limit:
        return None
    return (short.anew_ms - now_ms) / 1000 + random.uniform(0, min(JITTER_MAX_S, JITTER * short.period_ms / 1000))


def _why(short: Budget, task_id: str, needs: int) -> str:
    used = f"{short.used} of {short.limit} tokens are used and {short.reserved} reserved, this call needs about {needs}"
    anew = f"; it begins anew at {utc(short.anew_ms)}" if short.anew_ms is not None else ""
    raise_it = f"`baton budget set {short.scope} tokens=N` with a higher N lets it go on"
    return (
        f"the budget {short.scope} has no room: {used}{anew}; {raise_it}, or `baton retry {task_id}` when there is room"
    )
