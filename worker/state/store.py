"""The whole protocol: one verb per transition. Nothing else changes a task's keys.

    verb                                       from → to
    create                                     – → queued with its RQ job, in one EXEC (with a delay: parked)
    claim                                      queued → running
    begin, save_response (A), mark_started,
    record_result, save_results (B), renew     running
    finish                                     running → succeeded, failed, cancelled
    park / wake                                running → parked / parked → queued
    hand_over                                  running → queued, at the front
    recover                                    running, holder proven gone → queued; dead after too many crashes;
                                               cancelled if a person asked for it
    redeliver                                  queued, delivery lost → queued
    cancel                                     queued, parked → cancelled; running → asked through control
    retry                                      failed, dead, cancelled → queued, by a person
    resolve                                    parked → queued, by a person who knows what became of a call

Giving or taking ownership changes the epoch in the same EXEC, so a holder that slept wakes up fenced. A holder
never watches its lock: the renewal would abort its own commit; ownership is the epoch, the lock's ttl only says
when somebody may take it away. After a lost reply each verb reads again and recognises its own change: a commit
by `commit`, a release by `released`, all others by `change`; and should somebody have changed the task again in
between, a claim by its token, create by its nonce, retry by its mark, while the rest find nothing left to do.
"""

from __future__ import annotations

from typing import Any

from redis.client import Pipeline

from worker.errors import StorageRefused
from worker.state.asked import Asked
from worker.state.checkpoint import VERSION, Checkpoint, Message
from worker.state.codec import encode
from worker.state.keys import call_field, lapsed_field, resolution_field
from worker.state.lease import Holder, epoch_number, new_token
from worker.state.ledger import Call, Entry, Marker
from worker.state.standing import Refused, Standing, refusal
from worker.state.task import ParkNote, Status
from worker.state.transact import Decision, Settled, Write


class Store(Asked):
    """The verbs. All raise RedisUnavailable or StorageRefused when Redis does not take part."""

    # -- by the sweeper --------------------------------------------------------------------------------------

    def wake(self, task_id: str, *, due_only: bool = False) -> bool:
        """Queue a parked task again; `due_only`: only if its time has come."""

        def decide(at: Standing, extra: list[Any]) -> Decision[bool]:
            if at.status is not Status.PARKED or (due_only and float(extra[0] or "inf") > at.now_ms):
                return Settled(False)
            number = at.delivery + 1
            return Write(lambda pipe: self.writes.queue(pipe, task_id, number, at.queue, at.now_ms, "woken"), True)

        return self._change(task_id, decide, reads=[("ZSCORE", self.keys.index("parked"), task_id)])

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
        self, task_id: str, *, proof: str, fence: str | None = None, beat: str | None = None, drained: bool = False
    ) -> Status | None:
        """Take a task from a holder that is gone, and count the crash. `fence`: the holder that was proven gone; with
        `beat`, only its connection was, so it must still be the latest one, and in no side effect: that may be going
        on where nobody can see it. Without either the lock must have lapsed. `drained`: its worker ended it, in order
        to end itself; that counts as a hand-over. Returns the new status, None if there was nothing to recover."""

        def decide(at: Standing, extra: list[Any]) -> Decision[Status | None]:
            gone = not at.locked if fence is None else at.fence == fence
            if beat is not None:
                gone = gone and at.beat == beat and not at.open_call
            if not at.exists or at.status is not Status.RUNNING or not gone:
                return Settled(None)
            crash = 0 if drained else 1
            crashes, in_row = at.crashes + crash, at.crashes_in_row + crash
            spent = not drained and (in_row >= self.policy.crashes_in_row_max or crashes >= self.policy.crashes_max)
            if beat is not None and spent:
                return Settled(None)  # a cut is no reason to end a task: its holder may be well. The lease will tell
            status = Status.CANCELLED if at.cancel is not None else Status.DEAD if spent else Status.QUEUED

            def queue(pipe: Pipeline) -> None:
                if fence is None or beat is not None:  # its process may live on
                    pipe.hset(self.keys.started(task_id), lapsed_field(epoch_number(at.fence)), at.now_ms)
                self.writes.recovered(pipe, task_id, at, status, crashes, in_row, proof, drained=drained)

            return Write(queue, status)

        return self._change(task_id, decide, watch=[self.keys.lock(task_id)])

    # -- by a runner -------------------------------------------------------------------------------------------

    def claim(self, task_id: str, delivery: int, owner: dict[str, Any]) -> Holder | Refused:
        """Take ownership for this delivery. `owner` is JSON for people and for the proof that its process is gone."""
        token, sent_at = new_token(), self.clock.monotonic()

        def decide(at: Standing, extra: list[Any]) -> Decision[Holder | Refused]:
            if at.fence.endswith(f":{token}"):
                return Settled(self._holder(task_id, at.fence, delivery, at.attempts))
            if refused := refusal(at, delivery):
                return Settled(refused)
            fence, ttl = f"{epoch_number(at.fence) + 1}:{token}", self.policy.lease_ttl_ms
            holder = self._holder(task_id, fence, delivery, at.attempts + 1)
            return Write(lambda pipe: self.writes.owned(pipe, task_id, fence, ttl, at, encode(owner)), holder)

        claimed = self._change(task_id, decide, watch=[self.keys.lock(task_id)])
        if isinstance(claimed, Holder):
            claimed.confirm(sent_at)
        return claimed

    def renew(self, holder: Holder) -> None:
        """Prolong the lease, and learn of a cancel. Raises LeaseLost."""
        try:
            self._renew(holder, with_index=True)
        except StorageRefused:  # a full server still grants PEXPIRE, and the lock is what counts
            self._renew(holder, with_index=False)

    def begin(self, holder: Holder, request: dict[str, Any], first: Message) -> None:
        """Freeze the request's prefix and open the conversation; once per task."""
        empty = Checkpoint(messages=[first])

        def queue(pipe: Pipeline, now: int, rest: list[Any]) -> None:
            pipe.hset(self.keys.task(holder.task_id), "request", encode(request))
            pipe.hset(self.keys.checkpoint(holder.task_id), "version", VERSION)
            self.writes.step(pipe, holder.task_id, first, empty)

        self._commit(holder, queue)

    def save_response(self, holder: Holder, message: Message | None, after: Checkpoint, **told: Any) -> None:
        """Point A. `after`: the checkpoint with the response in it; `message` None: counted, but not kept.
        `told` goes into the event. Sets `after.server_run_id`: the server that holds this point A."""

        def queue(pipe: Pipeline, now: int, rest: list[Any]) -> None:
            after.server_run_id = self.probe.identity(rest)
            self.writes.step(pipe, holder.task_id, message, after)
            self.writes.tell(pipe, holder.task_id, "responded", now, turn=after.turns, **told)

        self._commit(holder, queue, reads=self.probe.identity_commands)

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

    def save_results(self, holder: Holder, message: Message, after: Checkpoint, **told: Any) -> None:
        """Point B: every call of the turn has its result, in one user message."""

        def queue(pipe: Pipeline, now: int, rest: list[Any]) -> None:
            self.writes.step(pipe, holder.task_id, message, after)
            pipe.hset(self.keys.task(holder.task_id), "crashesInRow", 0)
            self.writes.tell(pipe, holder.task_id, "answered", now, turn=after.turns, **told)

        self._commit(holder, queue)

    def finish(self, holder: Holder, status: Status, *, reason: str, result: str = "", error: str = "") -> None:
        """The end of the task; exactly one such write can succeed."""

        def queue(pipe: Pipeline, at: Standing) -> None:
            self.writes.end(pipe, holder.task_id, status, at.now_ms, reason=reason, result=result, error=error)

        self._release(holder, queue, even_if_cancelled=True)

    def park(self, holder: Holder, reason: str, *, wait_ms: int | None, note: ParkNote | None = None) -> None:
        """Put the task aside, without a worker; `wait_ms` None waits for a person. Not a crash."""

        def queue(pipe: Pipeline, at: Standing) -> None:
            wake_at = None if wait_ms is None else at.now_ms + wait_ms
            self.writes.noted_park(pipe, holder.task_id, note or ParkNote())
            self.writes.park(pipe, holder.task_id, wake_at, at.now_ms, "parked", reason=reason)

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
