"""`baton budget`, `enqueue-task --deadline` and `--concurrency`, `baton retry --deadline`: seen through the commands.

They are run in this process: a process of its own for each would take twenty times as long.
"""

from __future__ import annotations

import pytest
import redis

from tests.support.commands import Puppet
from tests.support.here import Here
from worker.errors import MustWait
from worker.state.load import load
from worker.state.task import ParkNote, Status

pytestmark = pytest.mark.server


def waits(client: redis.Redis, task_id: str, needs: int) -> Puppet:
    """Claims it, finds no room for its next call, and parks it, as a worker does."""
    puppet = Puppet(client, task_id).claim()
    store = puppet.store
    load(store.client, store.keys, store.probe, puppet.held)
    with pytest.raises(MustWait) as told:
        store.reserve(puppet.held, needs, 0)
    store.park(puppet.held, str(told.value), wait_ms=None, note=ParkNote(waits_for=told.value.waits_for))
    return puppet


def test_a_budget_is_set_listed_raised_and_cleared(commands: Here, redis_client: redis.Redis) -> None:
    assert commands.run("baton", "budget") == "no budgets\n"
    assert commands.run("baton", "budget", "set", "tag=team-a", "tokens=1.5k/day") == "tag=team-a: 1500 tokens/day\n"
    assert commands.run("baton", "budget", "set", "fleet", "tokens=2M") == "fleet: 2000000 tokens\n"
    commands.run("enqueue-task", "x", "--task-id=t1", "--tag=team-a")
    waits(redis_client, "t1", 1_600)

    fleet, team = commands.json("baton", "budget")
    assert {name: team[name] for name in team if name != "beginsAnewMs"} == {
        "scope": "tag=team-a", "limit": 1_500, "periodMs": 86_400_000, "used": 0, "reserved": 0, "tasksWaiting": 1,
    }  # fmt: skip
    assert team["beginsAnewMs"] % 86_400_000 == 0
    assert (fleet["scope"], fleet["periodMs"], fleet["beginsAnewMs"]) == ("fleet", None, None)
    assert "baton budget set tag=team-a tokens=N" in commands.json("baton", "show", "t1")["reason"]

    raised = commands.run("baton", "budget", "set", "tag=team-a", "tokens=5M/day")
    assert raised == "tag=team-a: 5000000 tokens/day; 1 waiting tasks go on\n"
    assert commands.json("baton", "show", "t1")["status"] == Status.QUEUED
    assert commands.run("baton", "budget", "clear", "fleet") == "fleet: no budget any more\n"
    heading, row = commands.run("baton", "budget").splitlines()
    assert heading.split()[:2] == ["SCOPE", "LIMIT"]
    assert row.split()[:4] == ["tag=team-a", "5000000/day", "0", "0"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["set", "team-a", "tokens=5"], "is no scope"),
        (["set", "tag=", "tokens=5"], "is no scope"),
        (["set", "fleet", "tokens=5/year"], "is no budget"),
        (["set", "fleet", "tokens=0.4"], "a budget is 1 to"),
        (["clear", "fleet"], "fleet has no budget"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(commands: Here, words: list[str], says: str) -> None:
    assert says in commands.run("baton", "budget", *words, code=2)


def test_limits_of_time_and_of_tasks_at_once_are_asked_for_shown_and_renewed(
    commands: Here, redis_client: redis.Redis
) -> None:
    options = ["--deadline=2h", "--concurrency-key=team-a", "--concurrency=5"]
    commands.run("enqueue-task", "x", "--task-id=t1", *options)
    assert commands.run("enqueue-task", "x", "--task-id=t1", *options).startswith("t1\n"), "the same request"
    assert "is taken by" in commands.run("enqueue-task", "x", "--task-id=t1", "--deadline=3h", code=4)
    shown = commands.json("baton", "show", "t1")
    assert shown["deadline_ms"] - shown["created_at_ms"] == 7_200_000
    assert (shown["concurrency_key"], shown["concurrency"]) == ("team-a", 5)
    assert "5 of team-a" in commands.run("baton", "show", "t1")

    Puppet(redis_client, "t1").claim().finish(Status.FAILED, reason="limit: deadline")
    commands.run("baton", "retry", "t1", "--deadline=1d")
    again = commands.json("baton", "show", "t1")
    assert again["status"] == Status.QUEUED
    assert again["deadline_ms"] - again["changed_at_ms"] == 86_400_000
    assert "no time" in commands.run("enqueue-task", "x", "--deadline=soon", code=2)
    assert "go together" in commands.run("enqueue-task", "x", "--concurrency=5", code=2)
