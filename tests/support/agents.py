"""A worker in one process: the real runtime and store on fakeredis, a scripted model, and effects kept outside Redis.

Dying is played: at a crash point `Died` ends the attempt, which the product may catch nowhere, and the dead attempt's
connections are cut, so that it writes nothing more and releases nothing. To what is stored that is a SIGKILL.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import fakeredis
import pytest
import redis

from ops.transcript import check_log
from tests.support.script import Answer, Script, calls, say, use
from worker import agent, answers, attempt, runtime
from worker.clock import ManualClock
from worker.dispatch import JOB_TIMEOUTS, job_id, open_store
from worker.errors import TaskFailed
from worker.runtime import Runtime
from worker.settings import Settings, load_settings
from worker.state.checkpoint import Checkpoint, read_checkpoint
from worker.state.codec import decode
from worker.state.lease import Holder
from worker.state.server import FixedProbe
from worker.state.standing import Refused
from worker.state.standing import text as as_text
from worker.state.store import Store
from worker.state.task import NewTask, Status, Task
from worker.state.views import Views
from worker.tools import Tool, Toolbox, ToolContext, Verdict, tool

__all__ = ["Answer", "Bench", "Died", "JobTimeout", "Line", "Script", "T", "World", "calls", "say", "use"]

T = "t1"
JobTimeout = JOB_TIMEOUTS[0]
ATTEMPTS_MAX = 50


class Died(BaseException):
    """The process is gone; no except clause of the product may see this."""


# -- the world -----------------------------------------------------------------------------------------------------


class World:
    """What the tools did, outside Redis: one line for each real execution."""

    def __init__(self) -> None:
        self.effects: list[str] = []
        self.keys: dict[str, set[str]] = {}  # line → idempotency keys it was put under
        self.can_tell = True

    def did(self, what: str, line: str) -> str:
        self.effects.append(f"{what} {line}")
        return f"did {what} {line}"

    def tools(self) -> list[Tool]:
        """One tool of each nature; each does `line` and says so."""

        @tool(effect="read_only")
        def look(line: str) -> str:
            return self.did("look", line)

        @tool(effect="idempotent")
        def put(line: str, context: ToolContext) -> str:
            self.keys.setdefault(line, set()).add(context.idempotency_key)
            return self.did("put", line)

        @tool
        def send(line: str) -> str:
            return self.did("send", line)

        def was_posted(line: str) -> Verdict:
            if not self.can_tell:
                return Verdict.unknown()
            posted = f"post {line}" in self.effects
            return Verdict.happened(f"did post {line}") if posted else Verdict.not_happened()

        @tool(verify=was_posted)
        def post(line: str) -> str:
            return self.did("post", line)

        @tool(on_unknown="hold")
        def wire(line: str) -> str:
            return self.did("wire", line)

        return [look, put, send, post, wire]


# -- the worker ----------------------------------------------------------------------------------------------------


class Line:
    """The connections of one attempt. `broken` is raised instead of sending; `after_reply` runs after each reply."""

    def __init__(self) -> None:
        self.broken: BaseException | None = None
        self.after_reply: Callable[[], None] | None = None

    def client(self, server: fakeredis.FakeServer) -> redis.Redis:
        line = self

        class Connection(fakeredis.FakeRedisConnection):  # type: ignore[misc]
            def send_packed_command(self, *args: Any, **options: Any) -> None:
                if line.broken is not None:
                    # To the dead one's heartbeat the server is just away: nobody waits for its exception.
                    if threading.current_thread().name.startswith("heartbeat-") and isinstance(line.broken, Died):
                        raise redis.ConnectionError("cut")
                    raise line.broken
                super().send_packed_command(*args, **options)

            def read_response(self, *args: Any, **options: Any) -> Any:
                reply = super().read_response(*args, **options)
                if line.after_reply is not None:
                    line.after_reply()
                return reply

        return fakeredis.FakeRedis(server=server, connection_class=Connection)


class Bench:
    """One Redis, one task (`T`), one scripted model, and as many workers as it takes."""

    def __init__(self, *steps: Any, tools: tuple[Tool, ...] = (), clock: Any = None, **settings: Any) -> None:
        self.server = fakeredis.FakeServer()
        self.clock = clock or ManualClock(int(time.time() * 1000))
        self.settings: Settings = load_settings({}, **{"verify_settle_s": 0, **settings})
        self.model = Script(*steps)
        self.world = World()
        self.tools = [*self.world.tools(), *tools]
        self.probe = FixedProbe()
        self.line = Line()  # of the attempt that runs now
        self.after_reply: Callable[[], None] | None = None
        self.holder: Holder  # the latest
        self.passed: Counter[str] = Counter()  # how often `run` passed each crash point
        self.store = self.open(Line())
        self.views = Views(self.store.client, self.store.keys, self.clock)

    def open(self, line: Line) -> Store:
        store = open_store(self.settings, line.client(self.server))
        store.clock, store.probe = self.clock, self.probe
        claim = store.claim

        def remember(*args: Any) -> Holder | Refused:
            claimed = claim(*args)
            if isinstance(claimed, Holder):
                self.holder = claimed
            return claimed

        store.claim = remember  # type: ignore[method-assign]
        return store

    def renew(self) -> None:
        """What the heartbeat of the latest holder does now and then."""
        self.store.renew(self.holder)

    def runtime(self) -> Runtime:
        """As a new process would make it."""
        self.line = line = Line()
        line.after_reply = self.after_reply
        return Runtime(
            self.settings,
            make_model=lambda settings: self.model,
            make_toolbox=lambda settings: Toolbox(self.tools),
            make_store=lambda settings: self.open(line),
        )

    def enqueue(self, words: str = "do it", task_id: str = T, **fields: Any) -> None:
        self.store.create(NewTask(task_id, words, self.settings.queue, **fields))

    def deliver(self, task_id: str = T, delivery: int | None = None) -> str:
        """What RQ does with the task's current job: off the list, run; a TaskFailed is a failed job, not ours."""
        number = self.task(task_id).delivery if delivery is None else delivery
        self.store.client.lrem(f"rq:queue:{self.settings.queue}", 0, job_id(task_id, number))
        try:
            return self.runtime().attempt(task_id, number)
        except TaskFailed as failed:
            return str(failed)

    def take_over(self, task_id: str = T) -> Status | None:
        """What the sweeper does once the holder is proven gone."""
        fence = as_text(self.store.client.get(self.store.keys.epoch(task_id)))
        return self.store.recover(task_id, proof="killed", fence=fence)

    def run(self, *crashes: tuple[str, int], task_id: str = T) -> Status:
        """Deliver until the task has ended or is parked, dying at the n-th passing of each crash point named."""
        with self.dying(*crashes) as self.passed:
            for _ in range(ATTEMPTS_MAX):
                try:
                    self.deliver(task_id)
                except Died:
                    self.take_over(task_id)
                if self.status(task_id) is not Status.QUEUED:
                    return self.status(task_id)
        raise AssertionError(f"not ended after {ATTEMPTS_MAX} attempts")

    def dying(self, *crashes: tuple[str, int]) -> AbstractContextManager[Counter[str]]:
        """Crash points kill the attempt as told; gives how often each was passed."""
        return self.hooked(dict.fromkeys(crashes, self.die))

    def die(self) -> None:
        self.line.broken = Died()
        raise self.line.broken

    @contextmanager
    def hooked(self, hooks: Mapping[tuple[str, int], Callable[[], None]]) -> Iterator[Counter[str]]:
        """The n-th passing of a crash point calls its hook. Once an attempt is dead, none of its threads gets on."""
        passed: Counter[str] = Counter()
        lock = threading.Lock()

        def crash_point(label: str) -> None:
            with lock:
                passed[label] += 1
                hook = hooks.get((label, passed[label]))
            if hook is not None:
                hook()
            if isinstance(self.line.broken, Died):
                raise self.line.broken

        with pytest.MonkeyPatch.context() as patch:
            for module in (agent, answers, attempt, runtime):
                patch.setattr(module, "crash_point", crash_point)
            yield passed

    # -- looking ---------------------------------------------------------------------------------------------------

    def task(self, task_id: str = T) -> Task:
        return self.views.task(task_id)

    def status(self, task_id: str = T) -> Status:
        return self.views.status(task_id)

    @property
    def effects(self) -> list[str]:
        return self.world.effects

    def documents(self, task_id: str = T) -> list[bytes]:
        return self.store.client.lrange(self.store.keys.messages(task_id), 0, -1)

    def messages(self, task_id: str = T) -> list[dict[str, Any]]:
        return [decode(document) for document in self.documents(task_id)]

    def results(self, task_id: str = T) -> list[dict[str, Any]]:
        """Every tool_result in the conversation, in order."""
        lists = [m["content"] for m in self.messages(task_id) if isinstance(m["content"], list)]
        return [block for content in lists for block in content if block["type"] == "tool_result"]

    def checkpoint(self, task_id: str = T) -> Checkpoint:
        """As the next holder would read it; raises where it is not sound."""
        raw = self.store.client.hgetall(self.store.keys.checkpoint(task_id))
        return read_checkpoint(raw, self.documents(task_id))

    def kinds(self, task_id: str = T) -> list[str]:
        return [event.kind for event in self.views.events(task_id)]

    def check(self, *, echoes: bool = True) -> None:
        """Every request that left was one the API accepts, and each continues the one before; `echoes`: and holds
        exactly what the model answered."""
        assert check_log(self.model.log if echoes else self.model.bodies) == []
