"""The whole protocol: one verb per transition. Nothing else changes a task's keys.

    verb                                       from → to
    create                                     – → queued with its RQ job, in one EXEC (with a delay: parked)
    claim                                      queued → running; → parked if all places of its key are taken;
                                               → failed if its deadline has passed
    reserve (tokens of budgets),
    begin, save_response (A), mark_started,
    record_result, save_results (B),
    renew, renew_all                           running
    finish                                     running → succeeded, failed, cancelled
    park / wake                                running → parked / parked → queued
    hand_over                                  running → queued, at the front
    expect_end                                 running, its worker is to end: its death will be a hand-over
    recover                                    running, holder proven gone → queued; dead after too many crashes;
                                               cancelled if a person asked for it
    redeliver                                  queued, delivery lost → queued
    cancel                                     queued, parked → cancelled; running → asked through control
    retry                                      failed, dead, cancelled → queued, by a person
    resolve                                    parked → queued, by a person who knows what became of a call

Some stand in `asked`, `slots` (claim), `budgeted` and `renewal`, which this class is made of.

Giving or taking ownership changes the epoch in the same EXEC, so a holder that slept wakes up fenced. A holder
never watches its lock: the renewal would abort its own commit; ownership is the epoch, the lock's ttl only says
when somebody may take it away. After a lost reply each verb reads again and recognises its own change: a commit
by `commit`, a release by `released`, all others by `change`; and should somebody have changed the task again in
between, a claim by its token, create by its nonce, retry by its mark, while the rest find nothing left to do.
"""

from __future__ import annotations

from typing import Any

from redis.client import Pipeline

from worker.state.budget import Open, read_budgets
from worker.state.budgeted import Budgets
from worker.state.checkpoint import VERSION, Checkpoint, Message
from worker.state.codec import encode
from worker.state.keys import call_field, resolution_field
from worker.state.lease import Holder, epoch_number
from worker.state.ledger import Call, Entry, Marker
from worker.state.renewal import Renewal
from worker.state.standing import Standing, text
from worker.state.task import ParkNote, Status
from worker.state.transact import CONFLICTS_MAX, Decision, Settled, Write, queued


class Store(Budgets, Renewal):
    """The verbs. All raise RedisUnavailable or StorageRefused when Redis does not take part."""

    # -- by the sweeper --------------------------------------------------------------------------------------

    def redeliver(self, task_id: str, delivery: int) -> bool:
        """Push a new wake-up, at the front, for a queued task whose delivery is on no list."""

        def decide(at: Standing, extra: list[Any]) -> Decision[bool]:
            if not at.exists or at.status is not Status.QUEUED or at.delivery != delivery:
                return Settled(False)

            def queue(pipe: Pipeline) -> None:
                self.writes.dispatcher.retire(pipe, task_id, delivery)
                pipe.hincrby(self.keys.task(task_id), "redeliveries", 1)
                self.writes.queue(pipe, task_id, delivery + 1, at.queue, at.now_ms, "redelivered", at_front=True)

            return Write(queue, True)

        return self._change(task_id, decide)

    def recover(
        self, task_id: str, *, proof: str, fence: str | None = None, beat: str | None = None,
        drained: bool = False, midway: bool = False,
    ) -> Status | None:  # fmt: skip
        """Take a task from a holder that is gone, and count the crash. `fence`: the holder that was proven gone; with
        `beat`, only its connection was, so it must still be the latest one, and in no side effect: that may be going
        on where nobody can see it. Without either the lock must have lapsed. `drained`: its worker ended it, in order
        to end itself; that counts as a hand-over, as it does after `expect_end`. `midway`: the process is alive, and
        may do what it is in the middle of. Returns the new status, None if there was nothing to recover."""

        reserved: tuple[str, ...] = ()  # in the budgets of these scopes; known once the task has been read
        place = ""

        def decide(at: Standing, extra: list[Any]) -> Decision[Status | Open | None]:
            nonlocal place
            gone = not at.locked if fence is None else at.fence == fence
            if beat is not None:
                gone = gone and at.beat == beat and not at.open_call
            if not at.exists or at.status is not Status.RUNNING or not gone:
                return Settled(None)
            handed = drained or at.leaving == at.fence
            crash = 0 if handed else 1
            crashes, in_row = at.crashes + crash, at.crashes_in_row + crash
            spent = not handed and (in_row >= self.policy.crashes_in_row_max or crashes >= self.policy.crashes_max)
            if beat is not None and spent:
                return Settled(None)  # a cut is no reason to end a task: its holder may be well. The lease will tell
            status = Status.CANCELLED if at.cancel is not None else Status.DEAD if spent else Status.QUEUED
            place, open_ = at.concurrency_key, Open.load(at.budget_open)
            if open_ is not None and not set(open_.scopes) <= set(reserved):
                return Settled(open_)

            def queue(pipe: Pipeline) -> None:
                if open_ is not None:  # its call may have been answered, and must be paid for
                    budgets = read_budgets(reserved, extra, at.now_ms)
                    self.purse.close(pipe, task_id, open_, budgets, open_.amount)
                if fence is None or beat is not None or midway:
                    self.writes.may_live_on(pipe, task_id, epoch_number(at.fence), at.now_ms)
                self.writes.recovered(pipe, task_id, at, status, crashes, in_row, proof, drained=handed)

            return Write(queue, status)

        outcome: Status | Open | None = None
        for _ in range(CONFLICTS_MAX):
            reads = self.purse.reads(reserved)
            outcome = self._change(task_id, decide, watch=[self.keys.lock(task_id)], reads=reads)
            if not isinstance(outcome, Open):
                break
            reserved = tuple(outcome.scopes)
        assert not isinstance(outcome, Open)  # each round is another holder's
        if outcome is not None:
            self._freed(place)
        return outcome

    def expect_end(self, task_id: str, fence: str) -> None:
        """This holder's worker is to end, and may have to end it: whoever finds it dead, and however, `recover` counts
        a hand-over. Nothing happens if it has let go by now."""

        def decide(at: Standing, extra: list[Any]) -> Decision[None]:
            if at.status is not Status.RUNNING or at.fence != fence or at.leaving == fence:
                return Settled(None)
            return Write(queued("HSET", self.keys.task(task_id), "leaving", fence), None)

        self._change(task_id, decide)

    # -- by a runner -------------------------------------------------------------------------------------------

    def begin(self, holder: Holder, request: dict[str, Any], first: Message, *, needs: int = 0) -> None:
        """Freeze the request's prefix and open the conversation; once per task. `needs`: tokens to reserve, if a budget
        applies, for the model call that follows (`holder.covered` tells whether that was done)."""
        empty = Checkpoint(messages=[first])

        def queue(pipe: Pipeline, now: int, rest: list[Any]) -> None:
            pipe.hset(self.keys.task(holder.task_id), "request", encode(request))
            pipe.hset(self.keys.checkpoint(holder.task_id), "version", VERSION)
            self.writes.step(pipe, holder.task_id, first, empty)

        self._commit_and_reserve(holder, queue, needs, 0)

    def save_response(self, holder: Holder, message: Message | None, after: Checkpoint, **told: Any) -> None:
        """Point A. `after`: the checkpoint with the response in it; `message` None: counted, but not kept.
        `told` goes into the event; its `tokens` are charged in place of what was reserved for the call. Sets
        `after.server_run_id`: the server that holds this point A."""
        asked, open_ = self.probe.identity_commands, holder.open
        scopes, spent = tuple(open_.scopes) if open_ else (), int(told.get("tokens", 0))

        def queue(pipe: Pipeline, now: int, rest: list[Any]) -> None:
            after.server_run_id = self.probe.identity(rest[: len(asked)])
            if open_ is not None:
                budgets = read_budgets(scopes, rest[len(asked) :], now)
                self.purse.close(pipe, holder.task_id, open_, budgets, spent)
            self.writes.step(pipe, holder.task_id, message, after)
            self.writes.tell(pipe, holder.task_id, "responded", now, turn=after.turns, **told)

        self._commit(holder, queue, reads=[*asked, *self.purse.reads(scopes)])
        holder.open, holder.granted, holder.calling = None, False, False

    def mark_started(self, holder: Holder, call: Call, effect: str = "side_effect") -> None:
        """The call may run from here on: before all but read-only ones. Ends a person's word about its last run."""

        def queue(pipe: Pipeline, now: int, rest: list[Any]) -> None:
            marker = Marker(holder.epoch, effect).dump(now)
            pipe.hset(self.keys.started(holder.task_id), call_field(call.turn, call.id), marker)
            pipe.hdel(self.keys.control(holder.task_id), resolution_field(call.turn, call.id))
            if effect == "side_effect":
                pipe.hset(self.keys.task(holder.task_id), "openCall", call_field(call.turn, call.id))
            self.writes.tell(pipe, holder.task_id, "call-started", now, turn=call.turn, call=call.id, name=call.name)

        self._commit(holder, queue)

    def record_result(self, holder: Holder, call: Call, entry: Entry, **told: Any) -> None:
        """The call ran and returned this. Each call has its own field, written the moment it returns."""

        def queue(pipe: Pipeline, now: int, rest: list[Any]) -> None:
            pipe.hset(self.keys.ledger(holder.task_id), call_field(call.turn, call.id), entry.dump(now))
            pipe.hset(self.keys.task(holder.task_id), "openCall", "")  # side effects run one at a time
            about = {"turn": call.turn, "call": call.id, "name": call.name, "isError": entry.is_error, **told}
            self.writes.tell(pipe, holder.task_id, "call-recorded", now, **about)

        self._commit(holder, queue)

    def save_results(
        self, holder: Holder, message: Message, after: Checkpoint, *, needs: int = 0, **told: Any
    ) -> None:  # fmt: skip
        """Point B: every call of the turn has its result, in one user message. `needs`: as in `begin`."""

        def queue(pipe: Pipeline, now: int, rest: list[Any]) -> None:
            self.writes.step(pipe, holder.task_id, message, after)
            pipe.hset(self.keys.task(holder.task_id), "crashesInRow", 0)
            self.writes.tell(pipe, holder.task_id, "answered", now, turn=after.turns, **told)

        self._commit_and_reserve(holder, queue, needs, after.turns)

    def finish(self, holder: Holder, status: Status, *, reason: str, result: str = "", error: str = "") -> None:
        """The end of the task; exactly one such write can succeed."""

        def queue(pipe: Pipeline, at: Standing) -> None:
            self.writes.end(pipe, holder.task_id, status, at.now_ms, reason=reason, result=result, error=error)

        self._release(holder, queue, even_if_cancelled=True)

    def warn(self, holder: Holder, kind: str, **told: Any) -> None:
        """An event for people. Bound to the fence like a renewal; told twice if the answer is lost."""
        epoch = self.keys.epoch(holder.task_id)

        def decide(replies: list[Any]) -> Decision[None]:
            self._require_fence(holder, text(replies[0]))
            now = self.clock.server_ms(replies[1])
            return Write(lambda pipe: self.writes.tell(pipe, holder.task_id, kind, now, **told), None)

        self._transact_as(holder, [epoch], [("GET", epoch), ("TIME",)], decide)

    def park(
        self, holder: Holder, reason: str, *, wait_ms: int | None, note: ParkNote | None = None, midway: bool = False
    ) -> None:
        """Put the task aside, without a worker; `wait_ms` None waits for a person. Not a crash. `midway`: as in
        `hand_over`."""

        def queue(pipe: Pipeline, at: Standing) -> None:
            wake_at = None if wait_ms is None else at.now_ms + wait_ms
            self.writes.noted_park(pipe, holder.task_id, note or ParkNote(), at.now_ms)
            if midway:
                self.writes.may_live_on(pipe, holder.task_id, holder.epoch, at.now_ms)
            self.writes.park(
                pipe, holder.task_id, wake_at, at.now_ms, "parked", reason=reason, deadline=at.deadline_ms
            )  # fmt: skip

        self._release(holder, queue, even_if_cancelled=False)

    def hand_over(
        self, holder: Holder, reason: str, *, abandoned: bool = False, midway: bool = False, undone: Call | None = None
    ) -> None:
        """Back to the front of the queue, for another worker. Not a crash. `abandoned`: a model call was given up for
        it. `midway`: in a call, which this process may yet do a moment longer. `undone`: a call that was begun and says
        itself that it did nothing, so that it will be run as if it had never started."""

        def queue(pipe: Pipeline, at: Standing) -> None:
            self.writes.handed_over(pipe, holder, at, reason, abandoned=abandoned, midway=midway, undone=undone)

        self._release(holder, queue, even_if_cancelled=False)
