"""Every verb against every fault at every message: the outcome is the one of the run without the fault (F06, F07).

A fault is a connection that dies before sending, a reply that is lost after the server applied the change, or a
server that refuses for a moment. Nothing may be applied twice, and nothing may be reported as failed that happened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from tests.state.faults import Fault, Plan, faulty
from tests.state.kit import (
    AT_A,
    AT_B,
    CALL,
    FIRST,
    OWNER,
    REQUEST,
    T,
    at_a,
    claim,
    claimed,
    counters,
    dump,
    ended,
    entry_for,
    field,
    lapse,
    make_store,
    marked,
    new_task,
    nothing_written,
    number,
    parked,
    queued,
    recorded,
    status,
)
from worker.clock import ManualClock
from worker.errors import LeaseLost, RedisUnavailable, StorageRefused
from worker.state.lease import Holder
from worker.state.load import load
from worker.state.store import Store
from worker.state.task import Status

pytestmark = pytest.mark.server

Prepared = Any
Verb = tuple[Callable[[Store], Prepared], Callable[[Store, Prepared], Any]]


def lapsed(store: Store) -> None:
    at_a(store)
    lapse(store)


def renew(store: Store, holder: Holder) -> None:
    """As the heartbeat does: it has no patience of its own, and comes back."""
    try:
        store.renew(holder)
    except RedisUnavailable:
        store.renew(holder)


VERBS: dict[str, Verb] = {
    "create": (lambda s: None, lambda s, _: s.create(new_task())),
    "create with a dedupe key": (lambda s: None, lambda s, _: s.create(new_task(dedupe_key="k"))),
    "create with a delay": (lambda s: None, lambda s, _: s.create(new_task(delay_ms=9))),
    "create many": (lambda s: None, lambda s, _: s.create_many([new_task(), new_task("t2", dedupe_key="k")])),
    "claim": (queued, lambda s, _: s.claim(T, 1, OWNER)),
    "cancel queued": (queued, lambda s, _: s.cancel(T, by="ann")),
    "cancel running": (at_a, lambda s, _: s.cancel(T, by="ann")),
    "retry": (lambda s: ended(s, Status.FAILED), lambda s, _: s.retry(T, by="ann")),
    "wake": (parked, lambda s, _: s.wake(T)),
    "redeliver": (queued, lambda s, _: s.redeliver(T, 1)),
    "recover": (lapsed, lambda s, _: s.recover(T, proof="p")),
    "begin": (claimed, lambda s, h: s.begin(h, REQUEST, FIRST)),
    "save_response": (lambda s: at_start(s), lambda s, h: s.save_response(h, AT_A.messages[-1], AT_A)),
    "mark_started": (at_a, lambda s, h: s.mark_started(h, CALL)),
    "record_result": (marked, lambda s, h: s.record_result(h, CALL, entry_for(CALL))),
    "save_results": (recorded, lambda s, h: s.save_results(h, AT_B.messages[-1], AT_B)),
    "finish": (at_a, lambda s, h: s.finish(h, Status.SUCCEEDED, reason="r")),
    "park": (at_a, lambda s, h: s.park(h, "waits", wait_ms=9)),
    "hand_over": (at_a, lambda s, h: s.hand_over(h, "drain")),
    "renew": (at_a, renew),
    "renew an evicted lock": (lambda s: evicted(s), renew),
    "load": (marked, lambda s, h: load(s.client, s.keys, s.probe, h)),
}


def at_start(store: Store) -> Holder:
    holder = claimed(store)
    store.begin(holder, REQUEST, FIRST)
    return holder


def evicted(store: Store) -> Holder:
    holder = at_a(store)
    lapse(store)
    return holder


@pytest.fixture
def calm(redis_client: redis.Redis, redis_url: str) -> Store:
    return make_store(redis_client)


def run(calm: Store, url: str, verb: str, plan: Plan) -> tuple[Any, Any]:
    """(outcome, whole database) of a verb on a fresh database, both without what differs from run to run."""
    prepare, act = VERBS[verb]
    calm.client.flushdb()
    calm.clock = ManualClock(int(calm.client.time()[0]) * 1000)
    holder = prepare(calm)
    with faulty(url, plan) as client:
        outcome = act(make_store(client, clock=calm.clock), holder)
    if isinstance(holder, Holder):
        outcome = (outcome, holder.seq)
    return settled(outcome), {key: settled(value) for key, (value, _) in dump(calm.client).items()}


def settled(value: Any) -> Any:
    """`value` in words, without tokens, times, and addresses."""
    words = re.sub(r"\b[0-9a-f]{16}\b|:[0-9a-f]{8}\b", "…", repr(value))
    words = re.sub(r"\b1[0-9]{12}(\.[0-9]+)?\b(-\d+)?", "(time)", words)
    words = re.sub(r"20\d\d-\d\d-\d\dT[\d:.]+Z", "(time)", words)
    return re.sub(r"_confirmed=[\d.]+|object at 0x\w+|Event at 0x[^>]*|lock object[^>]*", "…", words)


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("verb", VERBS)
def test_a_fault_changes_neither_the_outcome_nor_what_is_stored(
    calm: Store, redis_url: str, verb: str, fault: Fault
) -> None:
    expected = run(calm, redis_url, verb, messages := Plan())
    fired = 0
    for at in range(1, len(messages.sent) + 1):
        plan = Plan(fault, at)
        assert run(calm, redis_url, verb, plan) == expected, f"message {at} of {messages.sent}"
        fired += plan.fired
    assert fired >= 1 or (verb == "load" and fault.only_in_exec), "the fault never happened: the test tests nothing"


def test_control_the_faults_are_real(redis_client: redis.Redis, redis_url: str) -> None:
    """M1-M3: plain redis-py with its default retries runs a MULTI twice, and calls an applied change a conflict."""
    with faulty(redis_url, Plan(Fault.LOST, 1, execs_only=True), retry=redis.Redis().get_retry()) as client:
        with client.pipeline() as pipe:
            pipe.incr("n")
            pipe.rpush("list", "x")
            assert pipe.execute() == [2, 2], "one call, told as one, applied twice"
        client.flushdb()
    with faulty(redis_url, Plan(Fault.LOST, 1, execs_only=True)) as client, client.pipeline() as pipe:
        pipe.watch("n")
        pipe.multi()
        pipe.incr("n")
        with pytest.raises(redis.WatchError):
            pipe.execute()
    assert redis_client.get("n") == b"1", "reported as a conflict, and applied"
    redis_client.flushdb()
    with faulty(redis_url, Plan(Fault.LOST, 1, execs_only=True)) as client:
        client.transaction(lambda pipe: (pipe.multi(), pipe.incr("n")), "n")
    assert redis_client.get("n") == b"2", "redis-py's own transaction() doubles it"


# -- what a patience has to end with ------------------------------------------------------------------------------


@pytest.fixture
def broken(calm: Store, redis_url: str) -> Iterator[Callable[..., Store]]:
    """`broken(Fault.LOST, execs_only=True)`: a store on which that fault never ends."""
    clients: list[redis.Redis] = []

    def make(fault: Fault, **options: Any) -> Store:
        clients.append(faulty(redis_url, Plan(fault, 1, times=10_000, **options)))
        return make_store(clients[-1], clock=calm.clock)

    yield make
    for client in clients:
        client.close()


@pytest.mark.parametrize("fault", [Fault.UNSENT, Fault.LOST])
def test_a_connection_that_breaks_in_every_exec_ends_in_words(
    calm: Store, broken: Callable[..., Store], fault: Fault
) -> None:
    """redis-py reports it as a WatchError (a value over 512 MB is enough): retried at once, it would spin for ever."""
    queued(calm)
    store = broken(fault, execs_only=True)
    before = store.clock.monotonic()
    if fault is Fault.UNSENT:
        with nothing_written(calm.client), pytest.raises(RedisUnavailable, match="no answer from Redis"):
            store.claim(T, 1, OWNER)
        assert store.clock.monotonic() - before < 2 * store.policy.patience_s
        return
    assert isinstance(store.claim(T, 1, OWNER), Holder), "applied, and recognised by its token"
    calm.client.expire(f"rq:job:{T}-1", 600)


@pytest.mark.parametrize(("fault", "words"), [(Fault.OOM, "maxmemory"), (Fault.MISCONF, "MISCONF")])
def test_a_server_that_goes_on_refusing_is_named_with_its_own_words(
    calm: Store, broken: Callable[..., Store], fault: Fault, words: str
) -> None:
    """E14: the pipeline's error hid the cause; and what was emptied by the failure was sent again as a success."""
    store = broken(fault)
    with nothing_written(calm.client), pytest.raises(StorageRefused, match=words):
        store.create(new_task())


def test_a_server_that_is_away_is_unavailable_after_the_patience(calm: Store, broken: Callable[..., Store]) -> None:
    store = broken(Fault.UNSENT)
    with pytest.raises(RedisUnavailable, match="no answer from Redis"):
        store.create(new_task())


def test_a_holder_out_of_touch_stops_before_its_lease_ends(calm: Store, broken: Callable[..., Store]) -> None:
    """D10: by its own clock, long before its patience for a full Redis is over."""
    holder = at_a(calm)
    begin = calm.clock.monotonic()
    with pytest.raises(LeaseLost, match="out of touch"):
        broken(Fault.UNSENT).mark_started(holder, CALL)
    assert calm.clock.monotonic() - begin < holder.lease_ttl_s


def test_a_holder_waits_for_a_full_server_as_long_as_its_lease_is_renewed(
    calm: Store, broken: Callable[..., Store]
) -> None:
    """F02: full Redis at point B. The heartbeat's PEXPIRE still works, so the result is not given up at once."""
    holder = recorded(calm)
    waited = holder.clock
    holder.clock = ManualClock(int(waited.monotonic() * 1000))  # stands still, as if renewed all the time
    with nothing_written(calm.client), pytest.raises(StorageRefused, match="maxmemory"):
        broken(Fault.OOM).save_results(holder, AT_B.messages[-1], AT_B)
    assert waited.monotonic() > calm.policy.holder_patience_s
    calm.save_results(holder, AT_B.messages[-1], AT_B)  # memory is free again
    assert (holder.seq, field(calm, "crashesInRow")) == (5, "0")


def test_the_next_commit_does_not_take_an_unknown_ones_place_for_its_own(
    calm: Store, broken: Callable[..., Store]
) -> None:
    """Side by side, two tools return. The first's record is applied and its answer lost, for longer than anybody
    waits. If both carried the same stamp, the second would find "applied" and be dropped without a word."""
    holder = at_a(calm)
    unlucky = broken(Fault.LOST)
    unlucky.policy = type(calm.policy)(holder_patience_s=0)
    client = unlucky.client
    with pytest.raises(RedisUnavailable):
        with_fault_after_exec(unlucky, lambda: unlucky.record_result(holder, CALL, entry_for(CALL, "first")))
    assert calm.client.hget(calm.keys.checkpoint(T), "seq") == b"3", "it was applied"
    other = entry_for(CALL, "second")
    with pytest.raises(LeaseLost, match="seq 3, this holder left it at 2"):
        calm.record_result(holder, CALL, other)
    client.close()


def with_fault_after_exec(store: Store, act: Callable[[], Any]) -> None:
    """The fault begins with the EXEC: what comes before it goes through."""
    kind = store.client.connection_pool.connection_class
    kind.plan = FromExecOn(Fault.LOST)
    act()


class FromExecOn(Plan):
    def next(self, words: list[str]) -> Fault | None:
        self.fired += words[-1] == "EXEC" or self.fired
        return self.fault if self.fired else None


def test_control_without_faults_two_claims_count_two_attempts(calm: Store) -> None:
    """So the comparisons above can fail: what is compared does change with every applied change."""
    before = dump(calm.client)
    holder = claimed(calm)
    calm.hand_over(holder, "drain")
    claim(calm)
    assert dump(calm.client) != before
    assert (status(calm), number(calm, "attempts"), counters(calm)["claimed"]) == (Status.RUNNING, 2, 2)
