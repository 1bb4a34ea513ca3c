"""The holder's own bound: it trusts its lease no longer than an answered renewal allows, by its own clock (D10)."""

from __future__ import annotations

import pytest

from worker.clock import ManualClock
from worker.errors import CancelRequested, LeaseLost, StopRunning
from worker.state.lease import Holder, epoch_number, new_token


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def holder(clock: ManualClock) -> Holder:
    made = Holder("t1", "7:abc", 1, 1, clock, lease_ttl_s=15, margin_s=2)
    made.confirm(clock.monotonic())
    return made


def test_a_lease_is_trusted_until_a_margin_before_its_end(holder: Holder, clock: ManualClock) -> None:
    clock.advance(12.9)
    holder.check()
    clock.advance(0.2)
    with pytest.raises(LeaseLost, match="out of touch"):
        holder.check()


def test_what_counts_is_when_the_renewal_was_sent(holder: Holder, clock: ManualClock) -> None:
    """Its answer may have taken long; the server's ttl began somewhere in between."""
    sent_at = clock.monotonic()
    clock.advance(10)
    holder.confirm(sent_at)
    clock.advance(3.1)
    with pytest.raises(LeaseLost):
        holder.check()


def test_an_answer_that_comes_late_does_not_shorten_a_newer_one(holder: Holder, clock: ManualClock) -> None:
    early = clock.monotonic()
    clock.advance(5)
    holder.confirm(clock.monotonic())
    holder.confirm(early)
    clock.advance(12)
    holder.check()


def test_a_lost_lease_stays_lost_with_its_first_reason(holder: Holder, clock: ManualClock) -> None:
    clock.advance(14)
    with pytest.raises(LeaseLost):
        holder.check()
    holder.confirm(clock.monotonic())  # an answer that was on its way
    holder.lose("something else")
    with pytest.raises(LeaseLost, match="out of touch"):
        holder.check()
    assert holder.stop.is_set()


def test_a_cancel_stops_without_losing_the_lease(holder: Holder) -> None:
    holder.ask_to_cancel("ann")
    holder.check()
    assert holder.stop.is_set()
    with pytest.raises(CancelRequested, match="ann"):
        holder.watch()


def test_a_lost_lease_comes_before_a_cancel(holder: Holder) -> None:
    """Whoever does not own the task may not end it either."""
    holder.ask_to_cancel("ann")
    holder.lose("taken")
    with pytest.raises(LeaseLost):
        holder.watch()


def test_no_broad_except_of_a_tool_sees_either() -> None:
    assert not issubclass(StopRunning, Exception)


def test_tokens_are_random_for_each_claim() -> None:
    """C09: host and pid are the same again after a container restarts in place."""
    assert len({new_token() for _ in range(1_000)}) == 1_000


@pytest.mark.parametrize(
    ("fence", "number"), [(None, 0), ("", 0), (b"", 0), ("12:ab", 12), (b"12:ab", 12), ("13:", 13)]
)
def test_the_number_of_an_epoch(fence: bytes | str | None, number: int) -> None:
    assert epoch_number(fence) == number
