"""What holds of places and budgets after every step: each is counted once, and nowhere forgotten."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from tests.state.kit import AT_A, FIRST, OWNER, REQUEST, T, advance, claim, lapse, new_task, number, pop
from worker.errors import MustWait
from worker.state.budget import Budget, Open, reserved_field
from worker.state.keys import INDEXES
from worker.state.lease import Holder
from worker.state.load import load
from worker.state.standing import Refused, text
from worker.state.store import Store
from worker.state.task import ParkNote, Status


def check_places(store: Store) -> None:
    """The places of a key are held by exactly those of its tasks that run; whoever is in its line waits."""
    client, keys = store.client, store.keys
    running: dict[str, set[str]] = defaultdict(set)
    for member in client.zrange(keys.index("running"), 0, -1):
        if key := text(client.hget(keys.task(text(member)), "concurrencyKey")):
            running[key].add(text(member))
    first = keys.slots("")
    held = {text(name).removeprefix(first): set(map(text, client.smembers(name))) for name in _named(store, first)}
    assert held == dict(running), f"places held: {held}, running: {dict(running)}"
    for name in _named(store, first := keys.slots_waiting("")):
        key = text(name).removeprefix(first)
        assert client.sismember(keys.slots_wanted(), key), f"no sweeper is told of the line for {key}"
        for member in client.zrange(name, 0, -1):
            about = text(client.hget(keys.task(text(member)), "status"))
            assert about in (Status.QUEUED, Status.PARKED), f"{member!r} is {about} and in the line for {key}"


def check_budgets(store: Store) -> None:
    """What is reserved in a budget is what its tasks have reserved, and only tasks that run have."""
    client, keys = store.client, store.keys
    reserved: Counter[tuple[str, str]] = Counter()
    for name in INDEXES:
        for member in client.zrange(keys.index(name), 0, -1):
            open_ = Open.load(client.hget(keys.task(text(member)), "budgetOpen"))
            if open_ is not None:
                assert name == "running", f"{member!r} is {name} and has {open_.amount} tokens reserved"
                reserved.update(dict.fromkeys(open_.scopes.items(), open_.amount))
    for scope in map(text, client.smembers(keys.budgets())):
        born = text(client.hget(keys.budget(scope), "born"))
        amount = client.hget(keys.budget(scope), reserved_field(born))
        assert int(amount or 0) == reserved[scope, born], f"{scope}: {amount!r} reserved, {reserved} by tasks"


def _named(store: Store, first: str) -> list[bytes]:
    return list(store.client.scan_iter(f"{first}*", count=1000))


# -- tasks with places, tasks under budgets ---------------------------------------------------------------------------

KEY = "team-a"
DAY_MS = 86_400_000


def keyed(store: Store, *ids: str, places: int = 1, key: str = KEY) -> None:
    for task_id in ids:
        store.create(new_task(task_id, concurrency_key=key, concurrency=places))
        advance(store, 1)


def attempt(store: Store, task_id: str) -> Holder | Refused:
    delivery = number(store, "delivery", task_id)
    pop(store.client, f"{task_id}-{delivery}")
    return store.claim(task_id, delivery, OWNER)


def holders(store: Store, key: str = KEY) -> set[str]:
    return set(map(text, store.client.smembers(store.keys.slots(key))))


def line(store: Store, key: str = KEY) -> list[str]:
    return [text(one) for one in store.client.zrange(store.keys.slots_waiting(key), 0, -1)]


def _cancelled(store: Store, holder: Holder) -> None:
    store.cancel("a", by="ann")
    lapse(store, "a")
    assert store.recover("a", proof="p") is Status.CANCELLED


def _dead(store: Store, holder: Holder) -> None:
    store.client.hset(store.keys.task("a"), "crashesInRow", 2)
    lapse(store, "a")
    assert store.recover("a", proof="p") is Status.DEAD


WAYS_OUT: dict[str, Callable[[Store, Holder], Any]] = {
    "finish": lambda s, h: s.finish(h, Status.FAILED, reason="r"),
    "park": lambda s, h: s.park(h, "waits", wait_ms=None),
    "hand_over": lambda s, h: s.hand_over(h, "drain"),
    "recover": lambda s, h: (lapse(s, "a"), s.recover("a", proof="p")),
    "recover, by its process": lambda s, h: s.recover("a", proof="p", fence=h.fence),
    "recover, drained": lambda s, h: s.recover("a", proof="p", fence=h.fence, drained=True),
    "recover, dead": _dead,
    "recover, cancelled": _cancelled,
}


def one(store: Store, scope: str = "fleet") -> Budget:
    return store.list_budgets([scope])[0]


def counted(store: Store, scope: str = "fleet") -> tuple[int, int]:
    """(used, reserved)"""
    return one(store, scope).used, one(store, scope).reserved


def held(store: Store, task_id: str = T, *, tags: tuple[str, ...] = (), by: Store | None = None) -> Holder:
    """A holder that has read its task, as every runner's has."""
    if not store.client.exists(store.keys.task(task_id)):
        store.create(new_task(task_id, tags=tags))
    holder = claim(by or store, task_id)
    load(store.client, store.keys, store.probe, holder)
    return holder


def begun(store: Store, task_id: str = T, needs: int = 100, **fields: Any) -> Holder:
    holder = held(store, task_id, **fields)
    store.begin(holder, REQUEST, FIRST, needs=needs)
    return holder


def answered(store: Store, holder: Holder, tokens: int = 30) -> None:
    store.save_response(holder, AT_A.messages[-1], AT_A, tokens=tokens)


def wait_for(store: Store, holder: Holder, needs: int) -> MustWait:
    """The task finds no room and is parked as the runner would."""
    with pytest.raises(MustWait) as told:
        store.reserve(holder, needs, 0)
    wait = told.value
    wait_ms = None if wait.wait_s is None else int(wait.wait_s * 1000)
    store.park(holder, str(wait), wait_ms=wait_ms, note=ParkNote(waits_for=wait.waits_for))
    return wait
