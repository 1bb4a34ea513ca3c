"""A whole fleet in one thread, on a real server: workers, a sweeper and people, one after the other.

The runtime, the agent, the store, RQ's jobs and the sweeper are the real ones. Played are the model, the tools' world,
time, and the end of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import redis

from tests.support.agents import Bench, Died, Line, T
from tests.support.every_course import Course, Point, Process, Proof
from tests.support.every_server import Memory, digests
from tests.support.every_time import Clock, Heart, OneByOne, SlowScript
from worker import answers, proofs, runtime, sweeper
from worker.dispatch import open_store
from worker.errors import RedisUnavailable, StorageRefused, TaskFailed, TaskNotFound, WrongState
from worker.proofs import Proofs
from worker.runtime import Runtime
from worker.state.keys import Keys
from worker.state.store import Store
from worker.state.task import NewTask, Status
from worker.state.views import Views
from worker.sweeper import Sweeper
from worker.tools import Toolbox

if TYPE_CHECKING:
    from tests.support.every_stories import Story

ROUNDS_MAX = 100
ROUNDS_ASLEEP = 12  # enough for others to end the task, if they can
TRIES_MAX = 60
QUEUE = "rq:queue:agents"
AWAY = (RedisUnavailable, StorageRefused)
LEASE_S = 16.0  # a little more than a lease


class Fleet(Bench):
    """One run of a story, with the mishap of one point. `observer` looks on, and is RQ's: no mishap touches it."""

    def __init__(self, url: str, observer: redis.Redis, story: Story, point: Point) -> None:
        # Not the bench's own: that makes a fakeredis, and its tools anew for each of thousands of runs.
        self.url, self.observer, self.story, self.point = url, observer, story, point
        self.settings = story.settings
        self.clock: Clock = Clock(observer, Keys().lock(T))
        self.course = Course(point, self.clock)
        self.memory = Memory(observer)
        self.course.freeze, self.course.keep, self.course.restore = self._freeze, self.memory.keep, self.memory.restore
        self.model = SlowScript(self.clock, story.steps(self))
        self.world = story.world
        self.world.begin(self)
        self.tools = self.world.made
        self.line = Line()
        self.store = self.open(self.line)
        self.views = Views(observer, self.store.keys, self.clock)
        self.processes: list[Process] = []
        self.gone: set[int] = set()  # pids of those that are known to be gone
        self.sweeping: tuple[Process, Sweeper] | None = None
        self.asked: set[str] = set()  # what people did
        self.popped: set[str] = set()  # jobs that a worker took
        self.outcomes: list[str] = []  # what became of them, "" where the worker died
        self.woken: tuple[Process, dict[str, str]] | None = None  # who slept, and the database when it woke up
        self.idle = 0

    # -- processes -------------------------------------------------------------------------------------------------

    def open(self, line: Line) -> Store:
        store = open_store(self.settings, line.client(self.url) if isinstance(line, Process) else self.observer)
        store.clock = self.clock
        if isinstance(line, Process):
            store.probe = self.memory.probe
        return store

    def begin(self, who: str) -> Process:
        self.processes.append(Process(self.course, who, pid=len(self.processes) + 1))
        return self.processes[-1]

    def runtime(self) -> Runtime:
        self.line = process = self.begin("worker")
        return Runtime(
            self.settings,
            make_model=lambda settings: self.model,
            make_toolbox=lambda settings: Toolbox(self.tools),
            make_store=lambda settings: self.open(process),
        )

    def work(self, job: str) -> str:
        """A worker takes the job. Gives what became of it: what the runtime said, or "" if the process died."""
        before = self.line, self.clock.heart
        task_id, _, delivery = job.rpartition("-")
        outcome, runtime = "", self.runtime()
        process = self.line
        try:
            outcome = runtime.attempt(task_id, int(delivery))
        except TaskFailed as failed:
            outcome = f"failed: {failed}"
        except AWAY as error:
            outcome = f"gave up: {error}"
        except Died as died:
            if died is not process.broken:
                raise
        finally:
            self.line, self.clock.heart = before
        self.outcomes.append(outcome)
        self._require_silence(process)
        # RQ closes the jobs of workers that came back, and in time those of workers that had let go of their task.
        if outcome or self.stands() not in (Status.QUEUED, Status.RUNNING):
            self.observer.expire(f"rq:job:{job}", 600)
        if self.proof is not Proof.LAPSED:
            process.close()
        if self.proof is Proof.GONE:
            self.gone.add(process.pid)
        return outcome

    @property
    def proof(self) -> Proof:
        """By what the end of a process is found out: as the point says, once its mishap has struck."""
        return self.point.proof if self.course.fired else Proof.GONE

    def sweep(self) -> None:
        """One pass; a sweeper that died is started again with the next."""
        if self.sweeping is None:
            store = self.open(process := self.begin("sweeper"))
            self.sweeping = process, Sweeper(store, store.writes.dispatcher, self.settings)  # type: ignore[arg-type]
            self.sweeping[1].proofs = Proofs(store.client, self.clock.monotonic)
        process, one = self.sweeping
        try:
            one.sweep_once()
        except Died as died:
            if died is not process.broken:
                raise
            self.sweeping = None
        except AWAY:
            self.clock.sleep(self.settings.sweep_period_s)

    def person(self, act: Callable[[Store], Any]) -> None:
        """A command, given again until it was taken, or until there is nothing left that it could do."""
        for _ in range(TRIES_MAX):
            process = self.begin("person")
            try:
                act(self.open(process))
                return
            except Died as died:
                if died is not process.broken:
                    raise
            except AWAY:
                pass
            except WrongState:
                if not self.course.fired:
                    raise
                return
            finally:
                process.close()
            self.clock.sleep(5)
        raise AssertionError("a person has given up")

    def ask(self, what: str, act: Callable[[Store], Any]) -> bool:
        """A person does this once in a run. False if it was done before."""
        if what in self.asked:
            return False
        self.asked.add(what)
        self.person(act)
        return True

    # -- the run ---------------------------------------------------------------------------------------------------

    @contextmanager
    def played(self) -> Iterator[Fleet]:
        """What is not real is so within the block; afterwards everybody is gone."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "Heartbeat", Heart)
            patch.setattr(runtime, "this_process", lambda: {"host": "h", "pid": getattr(self.line, "pid", 0)})
            patch.setattr(proofs, "is_gone", lambda owner: owner.get("pid") in self.gone)
            patch.setattr(sweeper, "end_left_behind", lambda: 0)  # tools here start no processes
            patch.setattr(answers, "ThreadPoolExecutor", OneByOne)
            try:
                yield self
            finally:
                for process in self.processes:
                    process.close()

    def run(self) -> Fleet:
        with self.played():
            self.drive()
        return self

    def drive(self) -> None:
        """Until the task has ended and nobody wants anything more of it."""
        for _ in range(ROUNDS_MAX):
            if self.go_on():
                return
        raise AssertionError(f"not ended after {ROUNDS_MAX} rounds: {self.stands()}")

    def go_on(self) -> bool:
        """The next thing that somebody does. True: there is nothing left to do."""
        status = self.stands()
        if status is None:
            new = NewTask(T, "do it", self.settings.queue, **self.story.asks)
            return not self.ask("create", lambda store: store.create(new))
        if self.story.people(self, status):
            return False
        if status.ended:
            return True
        job = self.observer.lpop(QUEUE)
        if job is None:
            self._wait_for_sweeper(status)
        else:
            self.idle = 0
            self.popped.add(job.decode())
            self.work(job.decode())
        return False

    def _wait_for_sweeper(self, status: Status) -> None:
        current = f"{T}-{self.task().delivery}"
        if status is Status.QUEUED and current not in self.popped:
            self.course.wrong.append(f"queued as {current}, and on no list")
        waits = {Proof.GONE: (0.0,), Proof.CUT_OFF: (0.0, 2.0), Proof.LAPSED: ()}[self.proof]
        self.clock.sleep(waits[self.idle] if self.idle < len(waits) else LEASE_S)
        self.idle += 1
        self.sweep()

    def stands(self) -> Status | None:
        try:
            return self.status()
        except TaskNotFound:
            return None

    def _freeze(self, process: Process) -> None:
        """What goes on while this process sleeps."""
        line, heart, sweeping, held = self.line, self.clock.heart, self.sweeping, self.stands() is Status.RUNNING
        if process is line:
            self.clock.heart = None  # it sleeps, too
        if sweeping and sweeping[0] is process:
            self.sweeping = None
        if self.clock.heart is None:  # nobody else works on the task
            self.clock.sleep(LEASE_S)
        for _ in range(ROUNDS_ASLEEP if self.point.ended and self.clock.heart is None else 0):
            if self.go_on():
                break
        else:
            self.sweep()
        self.line, self.clock.heart = line, heart
        if process is line and (held or self.point.ended):
            self.woken = process, digests(self.observer)

    def _require_silence(self, process: Process) -> None:
        """Who slept while its task was taken away must not have written anything since."""
        if self.woken is None or self.woken[0] is not process or self.woken[1] == (now := digests(self.observer)):
            return
        before = self.woken[1]
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        self.course.wrong.append(f"written by a process that woke up too late: {', '.join(changed)}")
