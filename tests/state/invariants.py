"""What holds after every test of this directory."""

from __future__ import annotations

from tests.state.fair_share import check_budgets, check_places
from tests.state.kit import indexes_of, status
from worker.state.keys import INDEXES
from worker.state.standing import text
from worker.state.store import Store


def check_invariants(store: Store) -> None:
    """No key outlives its reason, every task is in the one index of its status, locks always have a ttl."""
    client, keys = store.client, store.keys
    prefix = keys.task("")
    on_lists = {job for name in client.scan_iter("rq:queue:*") for job in client.lrange(name, 0, -1)}
    standing = {*map(keys.index, INDEXES), keys.counters(), keys.feed(), keys.missing(), "rq:queues"}
    standing |= {keys.slots_wanted(), keys.budgets(), keys.budget_waiting()}
    lasting = (keys.slots(""), keys.slots_waiting(""), keys.budget(""))  # checked below
    for raw in client.scan_iter(count=1000):
        key, ttl = text(raw), client.pttl(raw)
        if key in standing or key.startswith(("rq:queue:", *lasting)):
            continue
        if key.startswith(prefix) and not key.endswith(":lock"):
            _check_ttl_of_task_key(store, key.removeprefix(prefix).partition(":")[0], key, ttl)
        elif key.startswith("rq:job:"):
            assert ttl > 0 or key.removeprefix("rq:job:").encode() in on_lists, f"{key} stays for ever"
        else:
            assert ttl > 0, f"{key} has no ttl"
    for name in INDEXES:
        for member in client.zrange(keys.index(name), 0, -1):
            where = status(store, text(member)).listed_in
            assert where == name, f"{member!r} is {where} and listed as {name}"
    check_places(store)
    check_budgets(store)


def _check_ttl_of_task_key(store: Store, task_id: str, key: str, ttl: int) -> None:
    if status(store, task_id).ended:
        expires = {store.client.pexpiretime(k) for k in store.keys.of_task(task_id) if store.client.exists(k)}
        assert ttl > 0, f"{key} outlives its task"
        assert len(expires) == 1, f"keys of {task_id} end at different times"
    else:
        assert ttl == -1, f"{key} belongs to a live task and has a ttl"
        assert len(indexes_of(store, task_id)) == 1, f"{task_id} is in {indexes_of(store, task_id)}"
