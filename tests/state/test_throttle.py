"""What one task was told by the API, as all the others find it in Redis."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import redis

from tests.state.faults import Fault, Plan, faulty
from tests.state.kit import advance, claim, make_store, new_task, status, sweeper_of
from tests.support.waiting import wait_until
from worker.clock import SystemClock
from worker.state.store import Store
from worker.state.task import ParkNote, Status
from worker.state.throttle import STAGES, Closed, Endpoint, Throttle, Told

HERE = Endpoint("a" * 16, "api.example.com", "claude-x")
STEP_MS = 1_000
BUSY = Told(None, "529")


def throttle(store: Store, **numbers: float) -> Throttle:
    return Throttle(store.client, store.keys, store.clock, **{"step_s": 1, "wait_max_s": 60, **numbers})


def tell(shared: Throttle, seen: int = 0, told: Told = BUSY, endpoint: Endpoint = HERE) -> Closed:
    return shared.tell(endpoint, seen, told, patience_s=1)


def waits_ms(shared: Throttle) -> int:
    now, record = shared.look(HERE.digest)
    assert record is not None
    return record.until_ms - now


def test_what_one_is_told_all_find_until_the_ramp_is_over(store: Store, another: Callable[..., Store]) -> None:
    shared, others = throttle(store), throttle(another(clock=store.clock))
    assert others.look(HERE.digest)[1] is None
    tell(shared, told=Told(2_000, "429"))
    assert 2_000 <= waits_ms(others) <= 2_200, "never sooner than it asked for, and a little later"
    assert others.look("b" * 16)[1] is None, "another key, model or address has its own limit"
    key = store.keys.api(HERE.digest)
    assert 2_000 + STAGES * STEP_MS < store.client.pttl(key) < 20_000, "and then it ends by itself"
    assert b"429" in store.client.hvals(key)


def test_a_burst_that_hits_many_is_one_refusal_and_the_next_one_doubles_the_wait(store: Store) -> None:
    shared = throttle(store)
    first = tell(shared)
    assert [tell(shared) for _ in range(20)] == [first] * 20
    assert 1_000 <= waits_ms(shared) <= 1_100
    for streak, expected in ((2, 2_000), (3, 4_000), (4, 8_000)):
        _, seen = shared.look(HERE.digest)
        assert seen is not None
        assert tell(shared, seen.generation).streak == streak
        assert expected <= waits_ms(shared) <= expected * 1.1
        tell(shared, seen.generation)  # the burst's others, sent when it was let through
        assert expected <= waits_ms(shared) <= expected * 1.1


def test_many_who_are_told_at_the_same_moment_begin_one_generation(store: Store, another: Callable[..., Store]) -> None:
    several = [throttle(another(clock=store.clock)) for _ in range(8)]
    together = threading.Barrier(len(several))

    def told(one: Throttle) -> Closed:
        together.wait(10)
        return tell(one)

    with ThreadPoolExecutor(len(several)) as pool:
        records = list(pool.map(told, several))
    assert {(record.generation, record.until_ms, record.streak) for record in records} == {
        (records[0].generation, records[0].until_ms, 1)
    }


def test_one_of_the_burst_that_was_told_to_wait_longer_makes_all_wait_longer(store: Store) -> None:
    shared = throttle(store)
    first = tell(shared)
    again = tell(shared, told=Told(9_000, "429"))
    assert again == replace(first, until_ms=again.until_ms)
    assert waits_ms(shared) == 9_000
    tell(shared, told=Told(100, "429"))
    assert waits_ms(shared) == 9_000, "and none makes them wait for less"


@pytest.mark.parametrize("answered", [True, False])
def test_an_answer_ends_the_doubling(store: Store, answered: bool) -> None:
    shared = throttle(store)
    seen = tell(shared, tell(shared).generation)
    if answered:
        shared.answered(HERE.digest, seen.generation)
    assert tell(shared, seen.generation).streak == (1 if answered else 3)


def test_our_own_waits_have_a_bound_and_the_apis_have_none(store: Store) -> None:
    shared = throttle(store)
    seen = 0
    for _ in range(40):
        seen = tell(shared, seen).generation
    assert waits_ms(shared) == 60_000
    tell(shared, seen, Told(900_000, "429"))
    assert 900_000 <= waits_ms(shared) <= 910_000


def test_a_used_up_limit_closes_without_counting_as_a_refusal(store: Store) -> None:
    shared = throttle(store)
    record = tell(shared, told=Told(5_000, "a used-up limit", backs_off=False))
    assert record.streak == 0
    assert 5_000 <= waits_ms(shared) <= 5_500
    assert tell(shared, record.generation).streak == 1


def test_places_are_due_one_two_four_in_each_step_in_the_order_they_were_drawn(store: Store) -> None:
    shared = throttle(store)
    record = tell(shared)
    places = [shared.draw(HERE.digest)[2] for _ in range(31)]
    assert places == list(range(31))
    due = [record.due_ms(place) for place in places]
    assert all(earlier < later for earlier, later in pairwise(due))
    in_step = Counter((at - record.until_ms) // STEP_MS for at in due)
    assert in_step == {0: 1, 1: 2, 2: 4, 3: 8, 4: 16}
    assert record.due_ms(10**6) == record.over_ms, "and then everybody"
    drawn, until = replace(record, drawn=31), record.until_ms
    assert [drawn.in_line(at) for at in (0, until, until + STEP_MS, record.over_ms)] == [31, 30, 29, 0]


def test_places_drawn_at_once_are_all_different(store: Store, another: Callable[..., Store]) -> None:
    tell(throttle(store))
    several = [throttle(another(clock=store.clock)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(lambda number: several[number % 4].draw(HERE.digest)[2], range(40)))
    assert sorted(places) == list(range(40))


def test_a_place_of_a_record_that_has_just_ended_lets_through_and_leaves_nothing_behind(store: Store) -> None:
    shared = throttle(store)
    _, record, _ = shared.draw(HERE.digest)
    shared.answered(HERE.digest, 7)
    assert record is None
    for key in (store.keys.api(HERE.digest), store.keys.api_places(HERE.digest)):
        assert 0 < store.client.pttl(key) <= STEP_MS + 1


@pytest.mark.parametrize("damage", [{"untilMs": "soon"}, {"generation": ""}, {"stepMs": "0"}])
def test_a_record_that_cannot_be_read_makes_nobody_wait(store: Store, damage: dict[str, str]) -> None:
    shared = throttle(store)
    tell(shared)
    store.client.hset(store.keys.api(HERE.digest), mapping=damage)
    assert shared.look(HERE.digest)[1] is None
    assert tell(shared).streak == 1, "and the next one to be told writes a new one"
    assert shared.look(HERE.digest)[1] is not None


def test_a_record_of_a_clock_that_was_put_back_makes_nobody_wait(store: Store) -> None:
    shared = throttle(store)
    tell(shared)
    advance(store, -3_600)
    assert shared.look(HERE.digest)[1] is None


def test_all_closed_endpoints_are_listed_until_their_ramps_are_over(store: Store) -> None:
    shared = throttle(store)
    other = replace(HERE, digest="b" * 16, model="claude-y")
    tell(shared)
    tell(shared, told=Told(30_000, "429"), endpoint=other)
    assert [(one.model, one.told) for one in shared.closed()[1]] == [("claude-x", "529"), ("claude-y", "429")]
    advance(store, 20)
    assert [one.model for one in shared.closed()[1]] == ["claude-y"]


@pytest.mark.server
@pytest.mark.parametrize("fault", Fault)
def test_a_lost_reply_begins_no_second_generation(redis_client: redis.Redis, redis_url: str, fault: Fault) -> None:
    calm = make_store(redis_client)
    tell(throttle(calm), told=Told(1_000, "first"))
    _, seen = throttle(calm).look(HERE.digest)
    assert seen is not None
    for at in (1, 2):
        with faulty(redis_url, Plan(fault, at)) as client:
            shared = throttle(make_store(client, clock=calm.clock))
            record = tell(shared, seen.generation)
        assert (record.streak, record) == (2, throttle(calm).look(HERE.digest)[1])


# -- the sweeper keeps the ramp's times ---------------------------------------------------------------------------


@pytest.mark.server
def test_a_parked_task_is_woken_at_its_time_and_not_at_the_next_sweep(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(redis_client, clock=SystemClock())
    sweeper, over = sweeper_of(store), threading.Event()
    for task_id, wait_ms in (("soon", 150), ("sooner", 50), ("late", 3_600_000)):
        store.create(new_task(task_id))
        store.park(claim(store, task_id), "waits", wait_ms=wait_ms, note=ParkNote(waits_for="api"))
    looks: list[int] = []
    due = sweeper.next_due_s
    monkeypatch.setattr(sweeper, "next_due_s", lambda: looks.append(1) or due())
    resting = threading.Thread(target=sweeper.rest, args=(over, 600))
    resting.start()
    try:
        wait_until(lambda: status(store, "soon") is Status.QUEUED, "the second one to be woken", timeout=20)
        assert status(store, "sooner") is Status.QUEUED
        assert status(store, "late") is Status.PARKED
        assert len(looks) < 20, "it waits, it does not spin"
    finally:
        over.set()
        resting.join(10)
    assert not resting.is_alive()


def test_one_that_becomes_due_just_after_a_look_is_not_left_to_the_next_sweep(store: Store) -> None:
    """Seen as a place in the ramp that was a second late."""
    sweeper = sweeper_of(store)
    store.create(new_task("due"))
    store.park(claim(store, "due"), "waits", wait_ms=5_000)
    assert sweeper.wake_due() == []
    assert sweeper.next_due_s() == 5
    advance(store, 6)
    assert sweeper.next_due_s() == -1
    store.client.hset(store.keys.task("due"), "delivery", "?")
    assert sweeper.wake_due() == []
    assert sweeper.next_due_s() is None, "control: one that cannot be woken is not tried all the time"
    store.client.hset(store.keys.task("due"), "delivery", "1")
    assert sweeper.sweep_once().woken == ["due"]


def test_one_that_waited_for_the_api_comes_before_those_that_have_not_waited_yet(store: Store) -> None:
    """Behind it in line they would draw places before it is asked whether it still has its own."""
    for task_id in ("waited", "other", "new"):
        store.create(new_task(task_id))
    store.park(claim(store, "waited"), "waits", wait_ms=1, note=ParkNote(waits_for="api"))
    store.park(claim(store, "other"), "waits", wait_ms=1)
    advance(store, 1)
    assert store.wake("other")
    assert store.wake("waited")
    assert [job.decode() for job in store.client.lrange("rq:queue:agents", 0, -1)] == ["waited-2", "new-1", "other-2"]


def test_what_was_told_can_be_taken_back(store: Store) -> None:
    shared = throttle(store)
    tell(shared, told=Told(3_600_000, "429"))
    other = replace(HERE, digest="b" * 16, model="claude-y")
    tell(shared, endpoint=other)
    (listed,) = [one for one in shared.closed()[1] if one.model == HERE.model]
    shared.forget(listed.digest)
    assert [one.model for one in shared.closed()[1]] == [other.model]
    assert shared.look(HERE.digest)[1] is None
