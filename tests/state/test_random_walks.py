"""Random histories of one task: workers that sleep, die and wake up, sweepers, and people, in any order.

After every step the guarantees must hold: one owner at most, nothing written by anybody else, progress never goes
back, and no accepted task is forgotten. The seed is in the test's id.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from tests.state.invariants import check_invariants
from tests.state.kit import (
    OWNER,
    T,
    after_response,
    after_results,
    dump,
    entry_for,
    field,
    jobs,
    lapse,
    new_task,
    number,
    pop,
    said,
    status,
    use,
)
from worker.errors import CancelRequested, LeaseLost, WrongState
from worker.state.checkpoint import Checkpoint
from worker.state.lease import Holder
from worker.state.load import load
from worker.state.standing import text
from worker.state.store import Store
from worker.state.task import Status

STEPS = 120


class World:
    """One task, and everybody who ever held it."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.holders: list[tuple[Holder, Checkpoint | None]] = []
        self.popped: set[int] = set()
        self.most = (0, 0)

    # -- what may happen -------------------------------------------------------------------------------------------

    def worker_takes_a_job(self) -> None:
        waiting = jobs(self.store.client)
        if not waiting:
            return
        pop(self.store.client, waiting[0])
        self.popped.add(delivery := int(waiting[0].rpartition("-")[2]))
        if self.random.random() < 0.2:
            return  # killed between pop and start
        claimed = self.store.claim(T, delivery, OWNER)
        if isinstance(claimed, Holder):
            loaded = load(self.store.client, self.store.keys, self.store.probe, claimed)
            self.holders.append((claimed, loaded.checkpoint))

    def old_delivery_starts_after_all(self) -> None:
        if self.popped:
            delivery = self.random.choice(sorted(self.popped))
            claimed = self.store.claim(T, delivery, OWNER)
            if isinstance(claimed, Holder):
                self.holders.append((claimed, self._loaded(claimed)))

    def somebody_goes_on(self) -> None:
        """The holder, or one who still thinks it is: each tries its next step."""
        if not self.holders:
            return
        latest = len(self.holders) - 1
        place = latest if self.random.random() < 0.8 else self.random.randrange(len(self.holders))
        holder, now = self.holders[place]
        before, owns = dump(self.store.client), self._owns(holder)
        try:
            self.holders[place] = (holder, self._next_step(holder, now))
        except LeaseLost:
            assert not owns, "the owner was refused"
            assert dump(self.store.client) == before, "somebody else wrote"
        except CancelRequested:
            self.store.finish(holder, Status.CANCELLED, reason="asked")
        else:
            assert owns, "somebody else was let in"

    def lock_lapses(self) -> None:
        lapse(self.store)

    def sweeper_recovers(self) -> None:
        self.store.recover(T, proof="its lease ran out")

    def sweeper_recovers_by_an_old_proof(self) -> None:
        if self.holders:
            holder, _ = self.random.choice(self.holders)
            owned = self._owns(holder)
            assert (self.store.recover(T, proof="gone", fence=holder.fence) is not None) == owned

    def sweeper_redelivers(self) -> None:
        if status(self.store) is Status.QUEUED and f"{T}-{field(self.store, 'delivery')}" not in jobs(
            self.store.client
        ):
            assert self.store.redeliver(T, number(self.store, "delivery"))

    def task_is_woken(self) -> None:
        self.store.wake(T)

    def person_cancels(self) -> None:
        if self.random.random() < 0.3:
            with suppress(WrongState):
                self.store.cancel(T, by="ann")

    def person_retries(self) -> None:
        with suppress(WrongState):
            self.store.retry(T, by="ann")

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _owns(self, holder: Holder) -> bool:
        return text(self.store.client.get(self.store.keys.epoch(T))) == holder.fence

    def _loaded(self, holder: Holder) -> Checkpoint | None:
        return load(self.store.client, self.store.keys, self.store.probe, holder).checkpoint

    def _next_step(self, holder: Holder, now: Checkpoint | None) -> Checkpoint | None:
        store, chance = self.store, self.random.random()
        if chance < 0.10:
            store.renew(holder)
            return now
        if chance < 0.14:
            store.hand_over(holder, "drain")
            return now
        if chance < 0.18:
            store.park(holder, "waits", wait_ms=None)
            return now
        if now is None:
            first = {"role": "user", "content": "x"}
            store.begin(holder, {"model": "m"}, first)
            return Checkpoint(messages=[first])
        if not now.pending:
            if chance < 0.22:
                store.finish(holder, self.random.choice([Status.SUCCEEDED, Status.FAILED]), reason="r")
                return now
            after = after_response(now, use(f"toolu_{self.random.randrange(10**6)}"))
            store.save_response(holder, said(*after.messages[-1]["content"]), after)
            return after
        if chance < 0.45:
            store.mark_started(holder, now.pending[0])
            return now
        if chance < 0.7:
            store.record_result(holder, now.pending[0], entry_for(now.pending[0]))
            return now
        after = after_results(now)
        store.save_results(holder, after.messages[-1], after)
        return after

    def check(self) -> None:
        store = self.store
        check_invariants(store)
        fence = text(store.client.get(store.keys.epoch(T)))
        is_running = status(store) is Status.RUNNING
        assert bool(fence.partition(":")[2]) == is_running, f"{status(store)} under the fence {fence!r}"
        assert is_running or not store.client.exists(store.keys.lock(T))
        assert is_running or not store.client.hexists(store.keys.control(T), "cancel") or status(store).ended
        on_list = jobs(store.client)
        assert len(on_list) == len(set(on_list)), "a delivery is on the list twice"
        if status(store) is Status.QUEUED:
            current = number(store, "delivery")
            assert f"{T}-{current}" in on_list or current in self.popped, "nobody will ever look at it"
        progress = [int(n or 0) for n in store.client.hmget(store.keys.checkpoint(T), "seq", "turns")]
        assert tuple(progress) >= self.most
        self.most = (progress[0], progress[1])


@pytest.mark.parametrize("seed", range(12))
def test_the_guarantees_hold_in_any_order_of_events(store: Store, seed: int) -> None:
    world = World(store, seed)
    store.create(new_task())
    events = [
        world.worker_takes_a_job, world.worker_takes_a_job, world.old_delivery_starts_after_all, world.lock_lapses,
        *[world.somebody_goes_on] * 16,
        world.sweeper_recovers, world.sweeper_recovers_by_an_old_proof, world.sweeper_redelivers, world.task_is_woken,
        world.person_cancels, world.person_retries,
    ]  # fmt: skip
    for _ in range(STEPS):
        event = world.random.choice(events)
        event()
        world.check()
        if status(store) is Status.SUCCEEDED:
            return
