"""The schedule of a drill is the seed's, and covers what it is to cover."""

from __future__ import annotations

import pytest

from ops.drill.plan import ABOUT, KINDS, schedule, spread

LEASE_S = 3.0


def test_a_seed_gives_the_same_schedule_again_and_another_seed_another() -> None:
    first, again, other = (schedule(seed, 30, list(KINDS), lease_s=LEASE_S) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert spread(1, 60, 30) == spread(1, 60, 30) != spread(2, 60, 30)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_comes_before_any_comes_twice_and_none_after_the_end(seed: int) -> None:
    kills = schedule(seed, 30, list(KINDS), lease_s=LEASE_S)
    assert {kill.kind for kill in kills[: len(KINDS)]} == set(KINDS)
    times = [kill.at_s for kill in kills]
    assert times == sorted(times)
    assert times[-1] < 30
    assert len(kills) > 15


def test_only_the_kinds_that_were_asked_for_come() -> None:
    assert {kill.kind for kill in schedule(1, 30, ["horse", "stop"], lease_s=LEASE_S)} == {"horse", "stop"}
    assert schedule(1, 30, [], lease_s=LEASE_S) == []


def test_a_stopped_process_sleeps_past_its_lease_and_the_server_is_away_for_less_and_for_more() -> None:
    kills = [kill for seed in range(20) for kill in schedule(seed, 30, list(KINDS), lease_s=LEASE_S)]
    assert all(kill.pause_s > LEASE_S for kill in kills if kill.kind == "stop")
    outages = [kill.pause_s for kill in kills if kill.kind == "redis"]
    assert min(outages) < LEASE_S < max(outages)
    assert all(kill.pause_s == 0 for kill in kills if kill.kind in ("worker", "horse", "both", "sweeper"))


def test_half_of_the_tasks_are_there_at_once_and_the_others_come_in_the_first_half() -> None:
    times = spread(1, 60, 30)
    assert times[:30] == [0.0] * 30
    assert times == sorted(times)
    assert 10 < times[-1] < 15
    assert spread(1, 3, 30) == [0.0] * 3


def test_every_kind_is_told_of_in_the_help() -> None:
    assert set(ABOUT) == set(KINDS)
