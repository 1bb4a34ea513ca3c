"""The verbs of budgets; `worker.state.budget` says what a budget is.

A commit that leads to a model call reserves along with it, if there seems to be room, and learns from EXEC's own
answers whether every budget was kept: of many that reserve at once, those within the limit are granted and no other.
Who was not, or cannot tell, asks `reserve`, which decides under WATCH. So used and reserved tokens exceed a limit only
by what calls use beyond their estimates.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from redis.client import Pipeline

from worker.errors import MustWait, TaskFault
from worker.state.budget import WAITS, Budget, Open, held, read_budgets
from worker.state.lease import Holder
from worker.state.slots import UNCLAIMED_MS, Slots, waits
from worker.state.standing import number, text
from worker.state.task import Status, utc
from worker.state.transact import Decision, Settled, Write, transact

BATCH = 500
JITTER_MAX_S = 60.0
JITTER = 0.02  # of a period


class Waiting(NamedTuple):
    """A task's wait for the budget of `scope`. `woken`: it was, not long ago, and has not come yet."""

    scope: str
    needs: int
    woken: bool


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
        room = self._room([scope])
        return [one for waiting in self.all_waiting_for_budgets() for one in self._wake_those_with_room(waiting, room)]

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

    def all_waiting_for_budgets(self) -> Iterator[dict[str, Waiting]]:
        """`waiting_for_budgets`, batch by batch."""
        place = 0
        while place < int(self.client.zcard(self.keys.budget_waiting())):
            waiting = self.waiting_for_budgets(place)
            yield waiting
            place += len(waiting)  # the others are off the list by now

    def waiting_for_budgets(self, place: int = 0) -> dict[str, Waiting]:
        """A batch of the tasks that wait for a budget, longest waiting first. Others that are still listed are taken
        off the list."""
        client: Any = self.client
        ids = [text(raw) for raw in client.zrange(self.keys.budget_waiting(), place, place + BATCH - 1)]
        with client.pipeline(transaction=False) as pipe:
            pipe.time()
            for task_id in ids:
                pipe.hmget(self.keys.task(task_id), "status", "waitsFor", "budgetNeeds", "changedAtMs")
            time, *replies = pipe.execute(raise_on_error=False)
        since, waiting = self.clock.server_ms(time) - UNCLAIMED_MS, dict[str, Waiting]()
        for task_id, found in zip(ids, replies, strict=True):
            woken = waits(found, WAITS, Status.QUEUED) and number(found[3]) > since
            if woken or waits(found, WAITS):
                waiting[task_id] = Waiting(text(found[1]).removeprefix(WAITS), number(found[2]), woken)
        self._strike_off(self.keys.budget_waiting(), [one for one in ids if one not in waiting], WAITS)
        return waiting

    def offer_budgets(self) -> list[str]:
        """For sweepers: wake tasks whose budget has room for them by now. Returns them."""
        waiting = self.waiting_for_budgets(self._looked_at)
        self._looked_at += len(waiting)
        if self._looked_at >= int(self.client.zcard(self.keys.budget_waiting())):
            self._looked_at = 0
        return self._wake_those_with_room(waiting, self._room({one.scope for one in waiting.values()}))

    def _room(self, scopes: Collection[str]) -> dict[str, float]:
        """A scope whose budget was taken away has room for everybody."""
        budgets = self.list_budgets(sorted(scopes)) if scopes else []
        return dict.fromkeys(scopes, float("inf")) | {one.scope: one.left for one in budgets}

    def _wake_those_with_room(self, waiting: Mapping[str, Waiting], room: dict[str, float]) -> list[str]:
        """Takes what they need from `room`, and what those need that were woken before and have not come yet."""
        woken = []
        for task_id, one in sorted(waiting.items(), key=lambda item: not item[1].woken):
            with suppress(TaskFault):  # a damaged one keeps nobody else waiting
                if one.woken and one.scope in room:
                    room[one.scope] -= one.needs
                elif one.needs <= room.get(one.scope, -1) and self.wake(task_id):
                    room[one.scope] -= one.needs
                    woken.append(task_id)
        return woken


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
