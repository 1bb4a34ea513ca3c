"""A worker in one process: the real runtime and store on fakeredis, a scripted model, and effects kept outside Redis.

Dying is played: at a crash point `Died` ends the attempt, which the product may catch nowhere, and the dead attempt's
connections are cut, so that it writes nothing more and releases nothing. To what is stored that is a SIGKILL.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import fakeredis
import pytest
import redis

from ops.transcript import check_log
from worker import agent, answers, runtime
from worker.clock import ManualClock
from worker.dispatch import JOB_TIMEOUTS, job_id, open_store
from worker.errors import TaskFailed
from worker.runtime import Runtime
from worker.settings import Settings, load_settings
from worker.state.checkpoint import Checkpoint, read_checkpoint
from worker.state.codec import decode
from worker.state.server import FixedProbe
from worker.state.standing import text as as_text
from worker.state.store import Store
from worker.state.task import NewTask, Status, Task
from worker.state.views import Views
from worker.tools import Tool, Toolbox, ToolContext, Verdict, tool

T = "t1"
JobTimeout = JOB_TIMEOUTS[0]
ATTEMPTS_MAX = 50


class Died(BaseException):
    """The process is gone; no except clause of the product may see this."""


# -- the model -----------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What `worker.model.Response` is, without the second that importing anthropic costs."""

    content: list[dict[str, Any]]
    stop_reason: str = "end_turn"
    usage: dict[str, int] = field(default_factory=lambda: {"input_tokens": 10, "output_tokens": 5})
    request_id: str | None = "req_1"
    tries: int = 1
    stop_details: dict[str, Any] | None = None

    @property
    def total_tokens(self) -> int:
        return sum(self.usage.values())

    @property
    def text(self) -> str:
        return "".join(block.get("text") or "" for block in self.content if block.get("type") == "text")


def say(words: str = "done", stop: str = "end_turn") -> Answer:
    return Answer([{"type": "text", "text": words}], stop)


def use(name: str, number: int | str = 1, /, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": given}


def calls(*blocks: dict[str, Any], stop: str = "tool_use") -> Answer:
    return Answer(list(blocks), stop)


class Script:
    """Implements `worker.model.Model`: the n-th step answers a conversation with n assistant messages in it.

    A step is an Answer, an exception to raise, or a function of (request body, watch) that gives one of them; a list
    of them is gone through call by call, and its last one stays. Asking beyond the last step is an error. `log` keeps
    a deep copy of every request, as the scripted model's log does.
    """

    def __init__(self, *steps: Any) -> None:
        self.steps = [deque(step if isinstance(step, list) else [step]) for step in steps]
        self.log: list[dict[str, Any]] = []

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [line["body"] for line in self.log]

    def respond(self, request: dict[str, Any], messages: Any, *, watch: Callable[[], None]) -> Answer:
        watch()
        body = copy.deepcopy({**request, "messages": list(messages)})
        self.log.append({"body": body})
        number = sum(message["role"] == "assistant" for message in messages)
        assert number < len(self.steps), f"asked once more after the end of the script: {messages[-1]}"
        left = self.steps[number]
        step = left.popleft() if len(left) > 1 else left[0]
        if callable(step) and not isinstance(step, type):
            step = step(body, watch)
        if isinstance(step, BaseException):
            raise step
        self.log[-1]["response"] = {"content": copy.deepcopy(step.content)}
        return copy.deepcopy(step)


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
        self.settings: Settings = load_settings({}, **settings)
        self.model = Script(*steps)
        self.world = World()
        self.tools = [*self.world.tools(), *tools]
        self.probe = FixedProbe()
        self.line = Line()  # of the attempt that runs now
        self.after_reply: Callable[[], None] | None = None
        self.passed: Counter[str] = Counter()  # how often `run` passed each crash point
        self.store = self.open(Line())
        self.views = Views(self.store.client, self.store.keys)

    def open(self, line: Line) -> Store:
        store = open_store(self.settings, line.client(self.server))
        store.clock, store.probe = self.clock, self.probe
        return store

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

    @contextmanager
    def dying(self, *crashes: tuple[str, int]) -> Iterator[Counter[str]]:
        """Crash points kill the attempt as told; yields how often each was passed."""
        passed: Counter[str] = Counter()
        lock = threading.Lock()

        def crash_point(label: str) -> None:
            with lock:
                passed[label] += 1
                dead = (label, passed[label]) in crashes
            if dead:
                self.line.broken = Died(label)
            if self.line.broken is not None:
                raise self.line.broken

        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for module in (agent, answers, runtime):
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

    def check(self) -> None:
        """Every request that left was one the API accepts, and each continues the one before."""
        assert check_log(self.model.log) == []
