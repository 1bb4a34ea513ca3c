"""Damaged records, a full server, a server that is away, its own death: nothing ends the sweeping."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tests.state.kit import (
    CALL,
    QUEUE,
    T,
    advance,
    at_a,
    claim,
    claimed,
    counters,
    dump,
    jobs,
    lapse,
    make_store,
    monitored,
    new_task,
    number,
    parked,
    queued,
    status,
    sweeper_of,
)
from worker.errors import RedisUnavailable, StorageRefused
from worker.state.store import Store
from worker.state.task import Status
from worker.state.transact import connect
from worker.sweeper import Sweeper

pytestmark = pytest.mark.server

GRACE_S = 3.0


@pytest.fixture
def store(valkey_store: Store) -> Store:
    return valkey_store


def wrong_type(*parts: str) -> Callable[[Store], None]:
    def damage(store: Store) -> None:
        for part in parts:
            store.client.delete(getattr(store.keys, part)(T))
            store.client.set(getattr(store.keys, part)(T), "something else")

    return damage


DAMAGE: dict[str, Callable[[Store], Any]] = {
    "task of another type": wrong_type("task"),
    "epoch of another type": lambda s: (s.client.delete(s.keys.epoch(T)), s.client.rpush(s.keys.epoch(T), "x")),
    "control of another type": wrong_type("control"),
    "no number for a delivery": lambda s: s.client.hset(s.keys.task(T), "delivery", "x"),
    "no status we know": lambda s: s.client.hset(s.keys.task(T), "status", "sleeping"),
    "no number for crashes": lambda s: s.client.hset(s.keys.task(T), "crashes", "many"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("state", ["queued", "running", "parked"])
def test_one_damaged_task_is_reported_and_stops_nothing(
    redis_client: redis.Redis, redis_url: str, state: str, damage: str
) -> None:
    client = connect(redis_url)
    store = make_store(client)
    sweeper = sweeper_of(store)
    {"queued": queued, "running": claimed, "parked": parked}[state](store)
    store.create(new_task("healthy"))
    claim(store, "healthy")
    client.delete(QUEUE)
    DAMAGE[damage](store)
    lapse(store)
    lapse(store, "healthy")
    sweeper.sweep_once()
    advance(store, 60)
    report = sweeper.sweep_once()
    assert list(report.recovered) == ["healthy"]
    assert status(store, "healthy") is Status.QUEUED
    assert list(report.problems) == [T]
    assert any(line.startswith(f"problem with {T}: ") for line in report.lines()), "a person hears of it"
    client.close()


SWEEP_STEPS = {f"the sweep itself ({step})" for step in ("recover", "redeliver", "wake", "prune")}


@pytest.mark.parametrize("name", ["running", "queued", "parked", "finished", "missing"])
def test_a_damaged_index_does_not_end_the_sweeper(redis_client: redis.Redis, redis_url: str, name: str) -> None:
    """Anything but a BatonError, raised from one step, once ended the process, and with it every recovery."""
    client = connect(redis_url)
    store = make_store(client)
    at_a(store)
    store.create(new_task("due", delay_ms=1))
    store.create(new_task("lost"))
    client.delete(QUEUE)
    sweeper = sweeper_of(store)
    sweeper.sweep_once()
    lapse(store)
    advance(store, 60)
    key = store.keys.missing() if name == "missing" else store.keys.index(name)
    client.delete(key)
    client.set(key, "something else")
    problems = sweeper.sweep_once().problems
    assert any("WRONGTYPE" in what for what in problems.values())
    assert all(step in SWEEP_STEPS or step in (T, "due", "lost") for step in problems)
    client.delete(key)
    assert sweeper.sweep_once().problems == {}, "mended, it goes on"
    client.close()


def test_a_full_server_does_not_end_the_sweeper(new_server: Callable[..., Any]) -> None:
    """F02: jobs were not recovered when space came back. A sweep that may not write says so and comes again."""
    server = new_server("full", port=0, extra=("--maxmemory", "64mb"))
    client = connect(server.url)
    store = make_store(client)
    sweeper = sweeper_of(store)
    at_a(store)
    lapse(store)
    store.create(new_task("lost"))
    client.delete(QUEUE)
    advance(store, 60)
    client.config_set("maxmemory", "1mb")
    report = sweeper.sweep_once()
    assert "maxmemory" in report.problems[T]
    assert "maxmemory" in report.problems["the sweep itself (redeliver)"]
    assert report.recovered == {}
    client.config_set("maxmemory", "64mb")
    assert list(sweeper.sweep_once().recovered) == [T]
    advance(store, 60)
    assert sweeper.sweep_once().redelivered == ["lost"]
    client.close()


def test_a_really_full_server(new_server: Callable[..., Any]) -> None:
    """M7 on a server that is full indeed: a change is refused whole, the lease lives on, nothing is counted twice."""
    server = new_server("full", port=0, extra=("--maxmemory", "64mb"))
    with redis.Redis.from_url(server.url) as client:
        store = make_store(client)
        holder = at_a(store)
        client.config_set("maxmemory", "1mb")
        before = dump(client)
        store.renew(holder)
        assert {key: value for key, (value, _) in dump(client).items()} == {k: v for k, (v, _) in before.items()}
        with pytest.raises(StorageRefused, match="maxmemory"):
            store.create(new_task("t2"))
        assert not client.exists(store.keys.task("t2"), "rq:job:t2-1")
        lapse(store)
        with pytest.raises(StorageRefused):
            store.renew(holder)  # a lock that is gone cannot be set again, and nobody pretends
        client.config_set("maxmemory", "64mb")
        store.renew(holder)
        store.mark_started(holder, CALL)
        assert (jobs(client), counters(store)["created"], number(store, "attempts")) == ([], 1, 1)


def test_a_server_that_is_away_is_one_error_of_ours(new_server: Callable[..., Any]) -> None:
    server = new_server("away", port=0)
    client = connect(server.url)
    sweeper = sweeper_of(make_store(client))
    sweeper.sweep_once()
    server.kill()
    with pytest.raises(RedisUnavailable):
        sweeper.sweep_once()
    new_server("away", port=0)
    assert not sweeper.sweep_once(), "and it goes on when the server is back"
    client.close()


def test_a_sweep_reads_small_things_only(store: Store, sweeper: Sweeper) -> None:
    """E10: a sweep that needed one bit read bodies of 25 MB each."""
    for n in range(5):
        store.create(new_task(f"q{n}", words="x" * 200_000))
    at_a(store)
    store.client.rpush(store.keys.messages(T), "x" * 1_000_000)
    parked_task = store.create(new_task("p")).task_id
    store.park(claim(store, parked_task), "w", wait_ms=60_000)
    sent = store.client.info("stats")["total_net_output_bytes"]
    with monitored(store.client) as seen:
        sweeper.sweep_once()
    sent = store.client.info("stats")["total_net_output_bytes"] - sent
    allowed = {"SMEMBERS", "SRANDMEMBER", "ZRANGE", "ZRANGEBYSCORE", "ZCARD", "GET", "EXISTS", "HGET", "HMGET",
               "LRANGE", "LPOS", "TIME", "ZREMRANGEBYSCORE", "CLIENT", "HELLO", "MULTI", "EXEC"}  # fmt: skip
    assert {words[0] for words in seen.commands} <= allowed
    bodies = (":messages", ":ledger", ":started", ":checkpoint", ":events")
    assert not [words for words in seen.commands if any(word.endswith(bodies) for word in words)]
    assert {words[1] for words in seen.commands if words[0] == "LRANGE"} == {QUEUE}
    read = {word for words in seen.commands if words[0] in ("HGET", "HMGET") for word in words[2:]}
    assert not read & {"text", "system", "request", "result"}
    assert sent < 50_000
    store.client.rpop(store.keys.messages(T))


def test_a_killed_sweeper_leaves_nothing_that_stops_the_next(store: Store, redis_url: str) -> None:
    """D02: the sweeper's own lock had no timeout. This one has none: it is killed in the middle of its sweep."""
    at_a(store)
    lapse(store)
    code = (
        "import os, signal, sys\nfrom worker.settings import load_settings\nfrom worker.sweeper import make_sweeper\n"
        "s = make_sweeper(load_settings({}, redis_url=sys.argv[1]))\n"
        "s.store.writes.dispatcher.push = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        "s.store.recover('t1', proof='p')\n"
    )
    assert subprocess.run([sys.executable, "-c", code, redis_url]).returncode == -9
    assert (status(store), number(store, "crashes")) == (Status.RUNNING, 0)
    advance(store, store.policy.lease_ttl_ms / 1000)
    assert list(sweeper_of(store).sweep_once().recovered) == [T]


def test_a_server_that_does_not_even_tell_the_time_is_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch, sweeper: Sweeper
) -> None:
    """Busy with somebody's endless script, it answered BUSY to TIME; that ended the sweeper, and nobody recovered."""

    def busy() -> int:
        raise redis.ResponseError("BUSY Valkey is busy running a script")

    monkeypatch.setattr(sweeper.views, "now_ms", busy)
    with pytest.raises(StorageRefused, match="BUSY"):
        sweeper.sweep_once()
