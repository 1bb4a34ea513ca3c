"""`baton api`: what the API has told the fleet, and taking it back."""

from __future__ import annotations

import pytest
import redis

from tests.support.commands import Puppet
from tests.support.here import Here
from worker.settings import load_settings
from worker.state.store import Store
from worker.state.task import ParkNote, Status
from worker.state.throttle import Endpoint, Told
from worker.throttle import throttle_of

pytestmark = pytest.mark.server

HERE = Endpoint("a" * 16, "api.example.com", "claude-x")
HOUR_MS = 3_600_000


def told_to_wait(store: Store) -> None:
    throttle_of(store, load_settings({})).tell(HERE, 0, Told(HOUR_MS, "429"), patience_s=1)


def parked(commands: Here, client: redis.Redis, waits_for: str) -> Puppet:
    puppet = Puppet(client, commands.run("enqueue-task", f"waits for {waits_for}").strip()).claim()
    puppet.store.park(puppet.held, "has to wait", wait_ms=HOUR_MS, note=ParkNote(waits_for=waits_for))
    return puppet


def test_it_lists_whom_the_fleet_waits_for(commands: Here, redis_client: redis.Redis) -> None:
    assert "nobody waits for an API" in commands.run("baton", "api")
    told_to_wait(parked(commands, redis_client, "api").store)
    assert "api.example.com" in commands.run("baton", "api")
    (found,) = commands.json("baton", "api")
    assert (found["host"], found["model"], found["told"], found["inARow"]) == (HERE.host, HERE.model, "429", 1)


def test_one_that_is_asked_again_wakes_those_that_wait_for_it_and_nobody_else(
    commands: Here, redis_client: redis.Redis
) -> None:
    one, other = parked(commands, redis_client, "api"), parked(commands, redis_client, "person")
    told_to_wait(one.store)
    assert "asked again; 1 waiting tasks go on" in commands.run("baton", "api", "open", HERE.host)
    assert commands.json("baton", "api") == []
    assert [commands.json("baton", "show", task.task_id)["status"] for task in (one, other)] == [
        Status.QUEUED.value,
        Status.PARKED.value,
    ]


def test_one_that_nobody_waits_for_is_said_so(commands: Here) -> None:
    assert "nobody waits for elsewhere" in commands.run("baton", "api", "open", "elsewhere", code=2)
