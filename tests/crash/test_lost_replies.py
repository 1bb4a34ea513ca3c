"""The connection between a real worker and Redis breaks at each of a task's transactions, once before and once after
Redis carried it out. Nothing is done twice, nothing is missing, and the task does not even lose an attempt (F06).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.fleet import SABOTAGE, Fleet
from tests.support.fleet_outcome import Outcome
from tests.support.fleet_proxy import Loss, LossyProxy

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(240)]

# claim, load, begin, A; read: record; put, append, pay: mark and record; B; A; finish
EXECS = 4 + 1 + 3 * 2 + 1 + 1 + 1


@pytest.fixture(scope="module")
def proxy(fleet: Fleet) -> Iterator[LossyProxy]:
    """A worker whose tasks reach Redis through the proxy; RQ itself has a way of its own."""
    with LossyProxy(fleet.url) as between:
        fleet.workers(1, BATON_REDIS_URL=between.url)
        yield between


@pytest.fixture(scope="module")
def clean(fleet: Fleet, proxy: LossyProxy) -> Outcome:
    """Nothing is lost."""
    proxy.arm(0)
    done = fleet.ended(fleet.enqueue("all"))
    fleet.await_job(done.task.task_id, 1, "finished")
    assert (done.problems(), proxy.lost) == ([], 0)
    assert proxy.execs == EXECS, "the tests below must go through all of them"
    return done


@pytest.mark.parametrize("at", range(1, EXECS + 1))
@pytest.mark.parametrize("loss", Loss, ids=lambda loss: loss.name.lower())
def test_a_transaction_or_its_reply_that_is_lost_changes_nothing(
    fleet: Fleet, proxy: LossyProxy, clean: Outcome, loss: Loss, at: int
) -> None:
    proxy.arm(at, loss)
    began = time.monotonic()
    done = fleet.ended(fleet.enqueue("all"), sweeping=True)
    assert time.monotonic() - began < 10
    fleet.await_job(done.task.task_id, 1, "finished")
    assert proxy.lost == 1
    assert done.problems() == []
    assert done.ran == clean.ran == dict.fromkeys(("read", "put", "append", "pay"), 1)
    assert done.results == clean.results
    assert set(done.decisions.values()) == {"run"}
    assert (done.task.attempts, done.task.crashes, done.task.delivery) == (1, 0, 1)
    assert (done.progress, len(done.requests)) == (clean.progress, 2)
    assert [event.kind for event in done.events] == [event.kind for event in clean.events]


def test_a_holder_that_does_not_recognise_its_own_commit_loses_the_call_it_was_about_to_run(
    fleet: Fleet, proxy: LossyProxy
) -> None:
    """The sabotage: the reply to the start marker of `append` is lost."""
    environ = {"BATON_TOOLS": SABOTAGE, "FLEET_SABOTAGE": "blind-commits", "BATON_REDIS_URL": proxy.url}
    fleet.workers(1, "blind", **environ)
    proxy.arm(8)
    done = fleet.ended(fleet.enqueue("all", "blind"), sweeping=True)
    assert proxy.lost == 1
    assert (done.task.attempts, done.task.crashes) == (2, 1)
    assert done.decisions["append"] == "unknown"
    assert done.ran["append"] == 0
