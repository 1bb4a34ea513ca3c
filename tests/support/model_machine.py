"""Everything that may happen to one task, as rules for hypothesis; and what must hold after each.

Only true things are proven here: a process is called gone when it is. What cannot be known is left to the protocol.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.state.invariants import check_invariants
from tests.state.kit import OWNER, field, jobs, kinds, lapse, new_task, number, pop, status, sweeper_of
from tests.support.every_server import Still, digests
from tests.support.model_world import Runner, T, World
from worker.answers import STATE_UNKNOWN
from worker.errors import CancelRequested, LeaseLost, WrongState
from worker.state.codec import decode
from worker.state.lease import Holder, epoch_number
from worker.state.ledger import Resolution
from worker.state.server import FixedProbe
from worker.state.standing import text
from worker.state.store import Store
from worker.state.task import Status

ANY = st.integers(min_value=0, max_value=1_000)
HOLDERS_MAX = 4


class Protocol(RuleBasedStateMachine):
    """`store` is put on the class: one server for all examples, emptied by each."""

    store: ClassVar[Store]

    @initialize()
    def accept(self) -> None:
        self.store.client.flushdb()
        self.store.probe = FixedProbe()
        self.world, self.runners = World(), list[Runner]()
        self.popped: list[int] = []
        self.most, self.epoch, self.ended, self.retries = (0, 0, 0), 0, 0, 0
        self.store.create(new_task())

    # -- workers -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: jobs(self.store.client))
    @rule(vanishes=st.integers(0, 9))
    def a_worker_takes_the_job(self, vanishes: int) -> None:
        job = jobs(self.store.client)[0]
        pop(self.store.client, job)
        self.popped.append(int(job.rpartition("-")[2]))
        if vanishes:
            self._claim(self.popped[-1])

    @precondition(lambda self: self.popped)
    @rule(which=ANY)
    def an_old_delivery_comes_late(self, which: int) -> None:
        self._claim(self.popped[which % len(self.popped)])

    @precondition(lambda self: self._alive())
    @rule(which=ANY, steps=st.integers(1, 6))
    def a_runner_goes_on(self, which: int, steps: int) -> None:
        alive = self._alive()
        runner = alive[-1] if which % 4 else alive[which % len(alive)]
        for _ in range(steps):
            if runner.done:
                return
            before, owned = digests(self.store.client), self._owned_by(runner)
            ran = self.world.effects.total()
            try:
                runner.go_on()
            except LeaseLost:
                assert not owned, "the owner was refused"
                assert digests(self.store.client) == before, "somebody else wrote"
            else:
                acted = digests(self.store.client) != before
                assert owned or not acted, "somebody who does not own the task wrote"
            assert self.world.effects.total() <= ran + 1

    @precondition(lambda self: self._alive())
    @rule(which=ANY)
    def a_runner_dies(self, which: int) -> None:
        alive = self._alive()
        alive[which % len(alive)].die()

    @precondition(lambda self: self._alive())
    @rule(which=ANY)
    def a_lease_is_renewed(self, which: int) -> None:
        alive = self._alive()
        with suppress(LeaseLost):
            self.store.renew(alive[which % len(alive)].holder)

    @precondition(lambda self: self._alive())
    @rule(which=ANY, why=st.sampled_from(["drain", "overload"]))
    def a_runner_lets_go(self, which: int, why: str) -> None:
        """Between two turns, as a drain and a model that is away do."""
        alive = self._alive()
        runner = alive[which % len(alive)]
        if runner.about_to:
            return
        with suppress(LeaseLost, CancelRequested):
            if why == "drain":
                self.store.hand_over(runner.holder, why)
            else:
                self.store.park(runner.holder, why, wait_ms=1_000)
            runner.die()

    @rule()
    def the_lease_runs_out(self) -> None:
        lapse(self.store)

    # -- sweepers ----------------------------------------------------------------------------------------------------

    @rule()
    def a_sweeper_takes_what_has_lapsed(self) -> None:
        self.store.recover(T, proof="its lease ran out")

    @precondition(lambda self: any(runner.dead for runner in self.runners))
    @rule(which=ANY)
    def a_sweeper_knows_of_a_death(self, which: int) -> None:
        dead = [runner for runner in self.runners if runner.dead]
        runner = dead[which % len(dead)]
        owned = self._owned_by(runner)
        taken = self.store.recover(T, proof="its process is gone", fence=runner.holder.fence)
        assert (taken is not None) == owned

    @precondition(lambda self: self._alive())
    @rule(which=ANY)
    def a_sweeper_misses_a_connection(self, which: int) -> None:
        """Of somebody who lives, and was only cut off."""
        runner = self._alive()[which % len(self._alive())]
        self.store.recover(T, proof="its connection is gone", fence=runner.holder.fence, beat=runner.holder.beat)

    @rule(seconds=st.integers(0, 20))
    def a_whole_sweep_some_time_later(self, seconds: int) -> None:
        self.store.clock.sleep(seconds / 100)  # far below a lease: that runs out by a rule of its own
        sweeper_of(self.store).sweep_once()

    @precondition(lambda self: status(self.store) is Status.QUEUED)
    @rule()
    def a_lost_delivery_is_sent_again(self) -> None:
        current = number(self.store, "delivery")
        if f"{T}-{current}" not in jobs(self.store.client):
            assert self.store.redeliver(T, current)
            assert not self.store.redeliver(T, current), "the same loss was mended twice"

    @rule()
    def the_task_is_woken(self) -> None:
        self.store.wake(T)

    # -- people ------------------------------------------------------------------------------------------------------

    @rule(really=st.integers(0, 5))
    def a_person_cancels(self, really: int) -> None:
        if not really:
            with suppress(WrongState):
                self.store.cancel(T, by="ann")

    @precondition(lambda self: status(self.store).ended)
    @rule()
    def a_person_retries(self) -> None:
        with suppress(WrongState):
            self.store.retry(T, by="ann")
            self.retries += 1

    @precondition(lambda self: status(self.store) is Status.PARKED)
    @rule(report=st.booleans())
    def a_person_says_what_became_of_a_call(self, report: bool) -> None:
        """The truth; and that a call has not happened only if nobody lives who may yet do it."""
        for call in decode(self.store.client.hget(self.store.keys.checkpoint(T), "pendingToolUse") or b"null") or []:
            name = f"{number_of_turns(self.store)}:{call['id']}"
            if self.world.effects[name]:
                word = Resolution("happened", f"did {name}")
            elif report or any(runner.about_to == name for runner in self._alive()):
                word = Resolution("report")
            else:
                word = Resolution("not_happened")
            with suppress(WrongState):
                self.store.resolve(T, number_of_turns(self.store), call["id"], word, by="ann")

    @rule(durable=st.booleans())
    def the_server_restarts(self, durable: bool) -> None:
        """Nothing is lost; whether that may be believed is another matter."""
        self.store.probe = FixedProbe(f"server {self.epoch} {durable}", durable=durable)

    # -- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def no_side_effect_happens_twice(self) -> None:
        twice = {call: times for call, times in self.world.side_effects().items() if times > 1}
        assert not twice, f"happened more than once: {twice}"

    @invariant()
    def what_the_model_is_told_is_true(self) -> None:
        turn = 0
        for raw in self.store.client.lrange(self.store.keys.messages(T), 0, -1):
            message: Any = decode(raw)
            turn += message["role"] == "assistant"
            for block in message["content"] if message["role"] == "user" and turn else []:
                happened = self.world.effects[f"{turn}:{block['tool_use_id']}"]
                assert happened or block["content"] == STATE_UNKNOWN, f"{block} and it never ran"

    @invariant()
    def it_is_where_it_says_and_somebody_will_look_at_it(self) -> None:
        store = self.store
        # Everything at one moment, in one round trip: this is looked at after every step.
        check_invariants(Store(Still(store.client), store.writes.dispatcher))  # type: ignore[arg-type]
        fence, now = text(store.client.get(store.keys.epoch(T))), status(store)
        assert bool(fence.partition(":")[2]) == (now is Status.RUNNING)
        assert now is Status.RUNNING or not store.client.exists(store.keys.lock(T))
        if now is Status.QUEUED:
            current = number(store, "delivery")
            assert f"{T}-{current}" in jobs(store.client) or current in self.popped
        assert epoch_number(fence) >= self.epoch
        self.epoch = epoch_number(fence)

    @invariant()
    def nothing_goes_back_and_it_ends_once(self) -> None:
        raw = self.store.client.hmget(self.store.keys.checkpoint(T), "seq", "turns", "totalTokens")
        progress = tuple(int(value or 0) for value in raw)
        assert all(now >= before for now, before in zip(progress, self.most, strict=True))
        assert progress[2] == progress[1] * 10, "tokens are those of the answers that were saved"
        self.most = (progress[0], progress[1], progress[2])
        assert kinds(self.store).count("ended") <= 1 + self.retries

    def teardown(self) -> None:
        """Whatever has happened: once nobody disturbs it any more, the task comes to its end."""
        if not hasattr(self, "world"):
            return
        for runner in self._alive():
            runner.die()
        for _ in range(60):
            lapse(self.store)
            self.a_sweeper_takes_what_has_lapsed()
            match status(self.store):
                case Status.PARKED:
                    self.a_person_says_what_became_of_a_call(report=False)
                    self.the_task_is_woken()
                case Status.QUEUED:
                    self.a_lost_delivery_is_sent_again()
                    for _ in range(len(jobs(self.store.client))):
                        self.a_worker_takes_the_job(vanishes=1)
                case Status.RUNNING:
                    raise AssertionError("nobody runs it, and it cannot be taken")
                case _:
                    return
            while self._alive():
                self.a_runner_goes_on(which=1, steps=6)
                self.no_side_effect_happens_twice()
                self.what_the_model_is_told_is_true()
        raise AssertionError(f"never ended: {status(self.store)}, {field(self.store, 'reason')}")

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _claim(self, delivery: int) -> None:
        claimed = self.store.claim(T, delivery, OWNER)
        if isinstance(claimed, Holder):
            assert claimed.epoch > self.epoch, "an epoch was given twice"
            self.runners.append(Runner(self.store, self.world, claimed))

    def _alive(self) -> list[Runner]:
        return [runner for runner in self.runners if not runner.done][-HOLDERS_MAX:]

    def _owned_by(self, runner: Runner) -> bool:
        return text(self.store.client.get(self.store.keys.epoch(T))) == runner.holder.fence


def number_of_turns(store: Store) -> int:
    return int(store.client.hget(store.keys.checkpoint(T), "turns") or 0)
