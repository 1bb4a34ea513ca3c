"""What a tool has started dies with the process that ran the tool, before anybody goes on with the task."""

from __future__ import annotations

import pytest

from tests.support.fleet import TOOLS, Fleet
from tests.support.fleet_children import pids_of
from tests.support.fleet_workers import kill_both
from tests.support.processes import alive
from worker.answers import STATE_UNKNOWN

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash, pytest.mark.timeout(240)]

UNKNOWN = (STATE_UNKNOWN, True)
REAL = ("appended line", False)
CHILDREN = {"BATON_TOOLS": f"{TOOLS},tests.support.fleet_children"}


def test_what_a_killed_horses_tool_has_started_dies_before_the_task_goes_on(fleet: Fleet) -> None:
    """H10: also what moved to a session of its own."""
    fleet.workers(1, "spawns", **CHILDREN)
    task_id = fleet.enqueue("spawns", "spawns")
    fleet.await_effect(task_id)
    (worker, _), children = fleet.worker_of(task_id), pids_of(fleet.workspace, task_id)
    assert [alive(pid) for pid in children] == [True, True]
    kill_both(worker)
    assert task_id in fleet.sweep().recovered
    assert [alive(pid) for pid in children] == [False, False]
    fleet.workers(1, "spawns", **CHILDREN)
    outcome = fleet.ended(task_id)
    assert (outcome.problems(), outcome.ran, outcome.results) == ([], {"append": 1}, [UNKNOWN])


def test_where_no_sweeper_runs_on_that_host_the_next_task_there_ends_them(fleet: Fleet) -> None:
    fleet.workers(1, "next", **CHILDREN)
    task_id = fleet.enqueue("spawns", "next")
    fleet.await_effect(task_id)
    (worker, _), children = fleet.worker_of(task_id), pids_of(fleet.workspace, task_id)
    kill_both(worker)
    assert [alive(pid) for pid in children] == [True, True]
    fleet.workers(1, "next", **CHILDREN)
    fleet.ended(fleet.enqueue("short", "next"))
    assert [alive(pid) for pid in children] == [False, False]
    assert fleet.ended(task_id, sweeping=True).problems() == []


def test_what_a_tool_leaves_running_ends_with_the_attempt_and_not_before(fleet: Fleet) -> None:
    """H11; and while another task's tool is at work, its children are left alone."""
    fleet.workers(2, "leaves", **CHILDREN)
    bystander = fleet.enqueue("spawns", "leaves")
    fleet.await_effect(bystander)
    outcome = fleet.ended(task_id := fleet.enqueue("leaves", "leaves"))
    assert (outcome.problems(), outcome.results) == ([], [REAL])
    fleet.await_job(task_id, 1, "finished")
    assert [alive(pid) for pid in pids_of(fleet.workspace, task_id)] == [False, False]
    assert [alive(pid) for pid in pids_of(fleet.workspace, bystander)] == [True, True]
    fleet.open_gate(bystander)
    assert fleet.ended(bystander).problems() == []
