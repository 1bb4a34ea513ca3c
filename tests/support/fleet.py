"""A fleet under test: stock `rq worker` processes, a sweeper, the scripted model over HTTP, one real server.

What really happened is read from outside: effects.log (each run of a tool) and the model's request log.
"""

from __future__ import annotations

import os
import secrets
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rq.job import Job

from enqueue.api import enqueue_task
from ops.processes import client as retryless_client
from ops.scripted_model import ScriptedModel
from ops.transcript import first_text
from tests.support.fleet_outcome import Outcome, Run
from tests.support.fleet_scripts import SCRIPTS
from tests.support.fleet_tools import EFFECTS, gate_of
from tests.support.fleet_workers import TASK_MAX_S, Victim, horses, is_worker_on, listening
from tests.support.logs import json_lines
from tests.support.processes import Proc
from tests.support.waiting import wait_until
from worker.dispatch import job_id, open_store
from worker.settings import load_settings
from worker.state.codec import decode
from worker.state.task import Status, Task
from worker.state.views import Views
from worker.sweeper import SweepReport, make_sweeper

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = ("BATON_", "ANTHROPIC_", "RQ_", "CRASH_", "FLEET_", "COVERAGE_PROCESS")
TOOLS = "tests.support.fleet_tools"
SABOTAGE = "tests.support.fleet_sabotage"


def measured() -> dict[str, str]:
    """Variables for a fleet whose processes the coverage of this run is to see; it makes them slower."""
    return {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_PROCESS")}


@dataclass
class Fleet:
    """Everything one test module starts; all of it ends with the `with` block of `running_fleet`."""

    home: Path
    url: str
    model: ScriptedModel
    stack: ExitStack
    queue: str = "agents"
    variables: dict[str, str] = field(default_factory=dict)
    processes: list[Proc] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workspace = self.home / "workspace"
        self.cwd = self.home / "cwd"  # no .env in it
        self.workspace.mkdir()
        self.cwd.mkdir()
        ours = {name: value for name, value in self.variables.items() if name.startswith("BATON_")}
        named = {name.removeprefix("BATON_").lower(): value for name, value in ours.items()}
        self.settings = load_settings({}, redis_url=self.url, queue=self.queue, **named)
        self.redis = retryless_client(self.url, timeout=10)
        self.stack.callback(self.redis.close)
        self.store = open_store(self.settings, self.redis)
        self.views = Views(self.redis, self.store.keys)

    # -- processes ---------------------------------------------------------------------------------------------

    def environment(self, **variables: str) -> dict[str, str]:
        """The test's own, without anything that changes how Baton, RQ or the client work."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_OURS)}
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "BATON_REDIS_URL": self.url,
            "BATON_WORKSPACE": str(self.workspace),
            "BATON_TOOLS": TOOLS,
            "BATON_SWEEP_PERIOD_S": "0.2",
            "BATON_VERIFY_SETTLE_S": "0",  # these tools take effect in their own process or not at all
            "ANTHROPIC_BASE_URL": self.model.url,
            "ANTHROPIC_API_KEY": "scripted",
            "NO_PROXY": "127.0.0.1",
            **self.variables,
            **variables,
        }

    def start(self, name: str, command: str, *args: str, **variables: str) -> Proc:
        program = Path(sys.executable).with_name(command)
        log = self.home / f"{name}-{len(self.processes)}.log"
        process = Proc([program, *args], log=log, env=self.environment(**variables), cwd=self.cwd)
        self.processes.append(self.stack.enter_context(process))
        return process

    def worker(self, *queues: str, options: Sequence[str] = (), preload: bool = True, **variables: str) -> Proc:
        """A stock worker. `preload`: it imports for its horses, which costs it 3 s once and them nothing."""
        if preload:
            variables = {"RQ_CONFIG": "tests.support.fleet_preload", **variables}
        names = queues or (self.queue,)
        return self.start("worker", "rq", "worker", *names, "-u", self.url, *options, **variables)

    def workers(self, number: int, *queues: str, **options: Any) -> list[Proc]:
        """That many, all of them listening."""
        started = [self.worker(*queues, **options) for _ in range(number)]
        for one in started:
            listening(one)
        return started

    def top_up(self, number: int) -> list[Proc]:
        """The live workers on the fleet's queue, as many as asked for; dead ones are replaced."""
        alive = [one for one in self.processes if one.returncode is None and is_worker_on(one, self.queue)]
        return [*alive, *self.workers(number - len(alive))]

    def worker_of(self, task_id: str) -> tuple[Proc, int]:
        """(worker, its work-horse) that runs the task now."""
        horse = int(self.task(task_id).owner["pid"])
        return next(one for one in self.processes if one.returncode is None and horse in horses(one)), horse

    def victim(self, point: str, queue: str, **variables: str) -> Victim:
        """A worker whose first horse to pass `point` (label:n) waits there to be killed."""
        once = self.home / f"{queue}.victim"
        environ = {"CRASH_AFTER": point, "CRASH_ONCE": str(once), "CRASH_WAIT": "1", **variables}
        return Victim(self.worker(queue, **environ), once)

    def sweeper(self, **variables: str) -> Proc:
        """`baton sweep`, five times a second."""
        return self.start("sweeper", "baton", "sweep", **variables)

    # -- tasks -------------------------------------------------------------------------------------------------

    def enqueue(self, kind: str, queue: str | None = None, *, more: str = "", **options: Any) -> str:
        """The id of a new task of that kind of SCRIPTS. No two tasks have the same text."""
        text = f"{kind} {secrets.token_hex(4)} {more}".strip()
        return enqueue_task(text, queue=queue, settings=self.settings, client=self.redis, **options).id

    def open_gate(self, task_id: str) -> None:
        gate_of(self.workspace, task_id).touch()

    @contextmanager
    def busy(self, workers: int, queue: str | None = None) -> Iterator[list[str]]:
        """So many workers are held by one task each while the block runs. Their tasks end well afterwards."""
        held = [self.enqueue("held", queue) for _ in range(workers)]
        try:
            for task_id in held:
                self.await_effect(task_id)
            yield held
        finally:
            for task_id in held:
                self.open_gate(task_id)
        for task_id in held:
            self.ended(task_id)

    def sweep(self) -> SweepReport:
        """One pass, in this process."""
        report = make_sweeper(self.settings).sweep_once()
        assert not report.problems
        return report

    def status(self, task_id: str) -> Status:
        return self.views.status(task_id)

    def task(self, task_id: str) -> Task:
        return self.views.task(task_id)

    def await_status(self, task_id: str, *wanted: Status, sweeping: bool = False, timeout: float = TASK_MAX_S) -> None:
        def there() -> bool:
            if sweeping:
                self.sweep()
            return self.status(task_id) in wanted

        try:
            wait_until(there, f"task {task_id} to be {'/'.join(wanted)}", timeout=timeout, poll_s=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.views.task(task_id)}\n{self.logs()}") from None

    def await_effect(self, task_id: str, tool: str = "append", times: int = 1) -> Run:
        """Wait until a tool has run for the task; the last such run."""

        def seen() -> list[Run]:
            found = [run for run in self.runs(task_id) if run.tool == tool]
            return found if len(found) >= times else []

        return wait_until(seen, f"run {times} of {tool} for {task_id}", timeout=TASK_MAX_S)[-1]

    def ended(self, task_id: str, *, sweeping: bool = False, timeout: float = TASK_MAX_S) -> Outcome:
        """Wait for the end of the task; what is known of it then. `sweeping`: this test is the sweeper."""
        ends = [status for status in Status if status.ended]
        self.await_status(task_id, *ends, sweeping=sweeping, timeout=timeout)
        return self.outcome(task_id)

    def outcome(self, task_id: str) -> Outcome:
        task = self.views.task(task_id)
        messages = [decode(raw) for raw in self.redis.lrange(self.store.keys.messages(task_id), 0, -1)]  # type: ignore[union-attr]
        events = self.views.events(task_id)
        return Outcome(
            task, events, self.runs(task_id), self.requests(task.text), messages, self.views.progress(task_id)
        )

    def runs(self, task_id: str) -> list[Run]:
        lines = json_lines(self.workspace / EFFECTS)
        return [
            Run(line["tool"], line["what"], line["key"], line["attempt"], line["pid"])
            for line in lines
            if line["task"] == task_id
        ]

    def requests(self, text: str) -> list[dict[str, Any]]:
        """The lines of the model's log that are this task's."""
        lines = json_lines(self.home / "requests.jsonl")
        return [line for line in lines if first_text(line["body"]) == text]

    # -- RQ ----------------------------------------------------------------------------------------------------

    def job(self, task_id: str, delivery: int = 1) -> Job:
        return Job.fetch(job_id(task_id, delivery), connection=self.redis)

    def await_job(self, task_id: str, delivery: int, *wanted: str) -> Job:
        """Wait until RQ has closed a delivery: that comes a moment after the end of the task."""
        wait_until(lambda: self.job(task_id, delivery).get_status() in wanted, f"job {delivery} to be {wanted}")
        return self.job(task_id, delivery)

    def queued_jobs(self, queue: str | None = None) -> list[str]:
        return [raw.decode() for raw in self.redis.lrange(f"rq:queue:{queue or self.queue}", 0, -1)]  # type: ignore[union-attr]

    def stored_by_rq(self) -> bytes:
        """All that RQ keeps in Redis, uncompressed."""
        return b"\n".join(part for key in self.redis.scan_iter("rq:*") for part in _parts(self.redis, key))

    def idle_workers(self) -> int:
        """Workers that block for jobs, as the server sees them: those, and no others, can be given one."""
        return sum(one["cmd"] in ("blmove", "blpop") for one in self.redis.client_list())

    def logs(self) -> str:
        return "\n".join(f"== {one.argv}\n{one.output()[-2000:]}" for one in self.processes)


def _parts(redis: Any, key: bytes) -> Iterator[bytes]:
    match redis.type(key):
        case b"hash":
            fields = redis.hgetall(key)
            yield from (part for pair in fields.items() for part in pair)
            with suppress(zlib.error):
                yield zlib.decompress(fields.get(b"data", b""))
        case b"stream":
            yield from (part for _, fields in redis.xrange(key) for pair in fields.items() for part in pair)
        case b"list":
            yield from redis.lrange(key, 0, -1)
        case b"zset":
            yield from redis.zrange(key, 0, -1)
        case b"set":
            yield from redis.smembers(key)
        case _:
            yield redis.get(key)


@contextmanager
def running_fleet(home: Path, url: str, **variables: str) -> Iterator[Fleet]:
    """An empty fleet on an emptied server. `variables`: for every process; settings (BATON_…) for the test, too."""
    scripts = [{"match": rf"^{kind} ", "turns": turns} for kind, turns in SCRIPTS.items()]
    with ExitStack() as stack:
        model = stack.enter_context(ScriptedModel({"scripts": scripts}, log=home / "requests.jsonl"))
        fleet = Fleet(home, url, model, stack, variables=variables)
        fleet.redis.flushall()
        yield fleet
