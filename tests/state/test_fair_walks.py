"""Places and budgets at random: whatever happens, each is counted once, and everybody has a turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.state.fair_share import DAY_MS, WAYS_OUT, attempt, check_budgets, check_places, held, holders, keyed, one
from tests.state.kit import FIRST, REQUEST, advance, field, kinds, lapse, new_task, status, sweeper_of
from worker.errors import CancelRequested, LeaseLost, MustWait, WrongState
from worker.state.checkpoint import Checkpoint
from worker.state.lease import Holder
from worker.state.standing import text
from worker.state.store import Store
from worker.state.task import ParkNote, Status


class Places:
    """Tasks of two keys, and everybody who ever held one."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store, self.random = store, random.Random(seed)
        self.places = {"x": 1, "y": 3}
        self.ids = [f"{key}{n}" for n in range(4) for key in self.places]
        self.held: dict[str, Holder] = {}
        for task_id in self.ids:
            keyed(store, task_id, key=task_id[0], places=self.places[task_id[0]])

    def step(self) -> None:
        task_id = self.random.choice(self.ids)
        act = self.random.choice([self.claim, self.claim, self.claim, self.let_go, self.let_go, self.meddle])
        advance(self.store, self.random.choice([0, 1, 70]))
        with suppress(WrongState, LeaseLost, CancelRequested):
            act(task_id)
        check_places(self.store)
        for key, places in self.places.items():
            assert len(holders(self.store, key)) <= places

    def claim(self, task_id: str) -> None:
        if isinstance(claimed := attempt(self.store, task_id), Holder):
            self.held[task_id] = claimed

    def let_go(self, task_id: str) -> None:
        if task_id in self.held:
            act = self.random.choice([WAYS_OUT["finish"], WAYS_OUT["park"], WAYS_OUT["hand_over"]])
            act(self.store, self.held[task_id])

    def meddle(self, task_id: str) -> None:
        store = self.store
        acts: list[Callable[[], Any]] = [
            lambda: store.cancel(task_id, by="ann"),
            lambda: store.retry(task_id, by="ann"),
            lambda: store.wake(task_id),
            lambda: store.recover(task_id, proof="p", fence=text(store.client.get(store.keys.epoch(task_id)))),
            lambda: store.begin(self.held[task_id], REQUEST, FIRST) if task_id in self.held else None,
            lambda: sweeper_of(store).sweep_once(),
        ]
        self.random.choice(acts)()

    def bring_to_an_end(self) -> None:
        """Whoever can go on does: nobody may be left waiting for a place that nobody holds."""
        for _ in range(40):
            for task_id in self.ids:
                if status(self.store, task_id).ended:
                    continue
                if status(self.store, task_id) is Status.PARKED and not field(self.store, "waitsFor", task_id):
                    self.store.wake(task_id)
                if status(self.store, task_id) is Status.RUNNING:
                    fence = text(self.store.client.get(self.store.keys.epoch(task_id)))
                    self.store.recover(task_id, proof="p", fence=fence, drained=True)
                if status(self.store, task_id) is Status.QUEUED:
                    self.claim(task_id)
                if status(self.store, task_id) is Status.RUNNING:
                    self.store.finish(self.held[task_id], Status.SUCCEEDED, reason="r")
                check_places(self.store)
            sweeper_of(self.store).sweep_once()
            advance(self.store, 61)
        left = {task_id: status(self.store, task_id) for task_id in self.ids}
        assert all(one.ended for one in left.values()), left


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_no_place_is_leaked_or_counted_twice_and_everybody_has_a_turn(store: Store, seed: int) -> None:
    walk = Places(store, seed)
    for _ in range(80):
        walk.step()
    walk.bring_to_an_end()
    assert kinds(store, "x0")[0] == "created"


class Tokens:
    """Tasks under two budgets, and everybody who ever held one."""

    NEEDS = 50

    def __init__(self, store: Store, seed: int) -> None:
        self.store, self.random = store, random.Random(seed)
        self.held: dict[str, Holder] = {}
        store.set_budget("fleet", 600, DAY_MS)
        store.set_budget("tag=a", 200, 0)
        for n in range(5):
            store.create(new_task(f"t{n}", tags=("a",) if n % 2 else ()))
        self.paid = 0  # tokens of answers, and of calls given up

    def step(self) -> None:
        task_id = f"t{self.random.randrange(5)}"
        act = self.random.choice([self.go_on, self.go_on, self.go_on, self.die, self.let_go, self.sweep])
        with suppress(LeaseLost):
            act(task_id)
        check_budgets(self.store)
        fleet, tag = one(self.store), one(self.store, "tag=a")
        assert fleet.used == self.paid
        assert fleet.used + fleet.reserved <= fleet.limit
        assert tag.used + tag.reserved <= tag.limit

    def go_on(self, task_id: str) -> None:
        store, holder = self.store, self.held.get(task_id)
        if status(store, task_id) is Status.QUEUED:
            self.held[task_id] = holder = held(store, task_id)
            if not store.client.exists(store.keys.checkpoint(task_id)):
                store.begin(holder, REQUEST, FIRST, needs=self.NEEDS)
        elif holder is None or holder.released or status(store, task_id) is not Status.RUNNING:
            return
        elif not holder.covered:
            try:
                store.reserve(holder, self.NEEDS, 0)
            except MustWait as wait:
                note = ParkNote(waits_for=wait.waits_for)
                store.park(holder, str(wait), wait_ms=wait.wait_s and int(wait.wait_s * 1000), note=note)
        else:
            holder.calling = True
            if self.random.random() < 0.7:
                tokens = self.random.randrange(1, self.NEEDS + 1)
                after = Checkpoint(turns=1, total_tokens=tokens, messages=[FIRST])
                store.save_response(holder, None, after, tokens=tokens)
                self.paid += tokens

    def die(self, task_id: str) -> None:
        store = self.store
        open_ = bool(field(store, "budgetOpen", task_id))
        lapse(store, task_id)
        if store.recover(task_id, proof="p", drained=True) is not None:
            self.paid += self.NEEDS * open_

    def let_go(self, task_id: str) -> None:
        holder = self.held.get(task_id)
        if holder is not None and not holder.released:
            open_ = bool(field(self.store, "budgetOpen", task_id)) and holder.calling
            self.store.hand_over(holder, "drain")
            self.paid += self.NEEDS * open_

    def sweep(self, task_id: str) -> None:
        sweeper_of(self.store).sweep_once()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_each_token_is_counted_once_and_no_limit_is_exceeded(store: Store, seed: int) -> None:
    walk = Tokens(store, seed)
    for _ in range(100):
        walk.step()
    assert walk.paid > 100
