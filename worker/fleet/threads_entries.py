"""What RQ writes down of a job that begins and ends, for many jobs at once: the same keys and formats (rq 3.0), with
one command for all members of a set."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import uuid4

from rq import Queue
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.registry import FinishedJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.utils import now, utcformat
from rq.worker import BaseWorker

from worker.fleet.threads_intake import Taken
from worker.state.lease import Holder


@dataclass(eq=False)
class Run:
    """A job that is being run. `holder`: once its task is claimed. `stop_asked`: somebody stopped it through RQ."""

    taken: Taken
    began: datetime = field(default_factory=now)
    holder: Holder | None = None
    stop_asked: bool = False
    closed: bool = False  # somebody has told the books of its end
    execution: Execution | None = None  # once its start is in the books

    @property
    def job(self) -> Job:
        return self.taken.job

    @property
    def queue(self) -> Queue:
        return self.taken.queue


@dataclass(frozen=True)
class Ended:
    """`words`: what came of it; or `error`, a traceback. `stopped`: it was ended through RQ."""

    words: str = ""
    error: str = ""
    stopped: bool = False
    at: datetime = field(default_factory=now)


Members = dict[str, dict[str, float]]  # zset → member → score


class Entries:
    """Of one worker. All methods queue into `pipe`; times to live are in seconds."""

    def __init__(self, worker: BaseWorker) -> None:
        self._worker = worker

    @property
    def ttl_s(self) -> int:
        """For how long an execution without a sign of life is believed in."""
        return int(self._worker.job_monitoring_interval) + 60

    def starts(self, pipe: Any, runs: Iterable[Run], over: Collection[Run]) -> None:
        """`over`: those that have ended already, so that nobody will ever ask who runs them."""
        wip: Members = defaultdict(dict)
        executions, until = [], time.time() + self.ttl_s
        for run in runs:
            job = run.job
            if run.taken.from_one:
                pipe.lrem(run.queue.intermediate_queue_key, 1, job.id)
            pipe.persist(job.key)
            if run in over:
                continue
            run.execution = execution = Execution(uuid4().hex, job.id, job.connection, self._worker.name)
            self._execution(pipe, execution, until)
            job.prepare_for_execution(self._worker.name, pipeline=pipe)
            wip[_wip(run.queue)][execution.composite_key] = until
            executions.append(execution.composite_key)
        _add(pipe, wip)
        if executions:
            pipe.sadd(self._worker.executions_key, *executions)
            pipe.expire(self._worker.executions_key, self.ttl_s + 60)

    def ends(self, pipe: Any, ends: Mapping[Run, Ended]) -> None:
        finished: Members = defaultdict(dict)
        for run, how in ends.items():
            job = run.job
            job.worker_name, job.started_at, job.ended_at = self._worker.name, run.began, how.at
            job.last_heartbeat = how.at
            if how.error:
                self._failure(pipe, run, how)
            else:
                self._success(pipe, run, how, finished)
        _add(pipe, finished)
        self._close(pipe, [(run, run.execution) for run in ends if run.execution is not None])
        self._count(pipe, ends)

    def beats(self, pipe: Any, runs: Iterable[Run]) -> None:
        """Signs of life."""
        wip: Members = defaultdict(dict)
        until = time.time() + self.ttl_s
        for run in runs:
            if run.execution is not None:
                self._execution(pipe, run.execution, until)
                wip[_wip(run.queue)][run.execution.composite_key] = until
        _add(pipe, wip, xx=True)

    def _execution(self, pipe: Any, execution: Execution, until: float) -> None:
        execution.last_heartbeat = now()
        registry = _registry(execution)
        pipe.hset(execution.key, mapping=execution.serialize())
        pipe.expire(execution.key, self.ttl_s)
        pipe.zadd(registry, {execution.id: until + 60})
        pipe.expire(registry, self.ttl_s + 60)

    def _success(self, pipe: Any, run: Run, how: Ended, finished: Members) -> None:
        job = run.job
        ttl = job.get_result_ttl(self._worker.default_result_ttl)
        if ttl == 0:
            job.cleanup(0, pipeline=pipe, remove_from_queue=False)
            return
        ended_at = utcformat(how.at)
        fields = {
            "status": JobStatus.FINISHED.value,
            "worker_name": self._worker.name,
            "started_at": utcformat(run.began),
            "ended_at": ended_at,
            "last_heartbeat": ended_at,
        }
        pipe.hset(job.key, mapping=fields)
        Result.create(job, Result.Type.SUCCESSFUL, ttl, return_value=how.words, pipeline=pipe, **self._about(run, how))
        finished[FinishedJobRegistry.key_template.format(run.queue.name)][job.id] = (
            float("inf") if ttl < 0 else time.time() + ttl
        )
        if ttl > 0:
            pipe.expire(job.key, ttl)

    def _failure(self, pipe: Any, run: Run, how: Ended) -> None:
        run.job.set_status(JobStatus.STOPPED if how.stopped else JobStatus.FAILED, pipeline=pipe)
        run.job._handle_failure(how.error, pipeline=pipe, **self._about(run, how))

    def _about(self, run: Run, how: Ended) -> dict[str, Any]:
        return {
            "worker_name": self._worker.name,
            "execution_id": run.execution.id if run.execution else None,
            "execution_started_at": run.began,
            "execution_ended_at": how.at,
        }

    def _close(self, pipe: Any, executed: list[tuple[Run, Execution]]) -> None:
        if not executed:
            return
        wip: dict[str, list[str]] = defaultdict(list)
        for run, execution in executed:
            wip[_wip(run.queue)].append(execution.composite_key)
        for key, members in wip.items():
            pipe.zrem(key, *members)
        pipe.srem(self._worker.executions_key, *(execution.composite_key for _, execution in executed))
        # This is the only execution of its job: no job is queued again under the same id.
        pipe.delete(*(key for _, execution in executed for key in (execution.key, _registry(execution))))

    def _count(self, pipe: Any, ends: Mapping[Run, Ended]) -> None:
        if not ends:
            return
        failed = sum(bool(how.error) for how in ends.values())
        if failed:
            pipe.hincrby(self._worker.key, "failed_job_count", failed)
        if len(ends) > failed:
            pipe.hincrby(self._worker.key, "successful_job_count", len(ends) - failed)
        seconds = sum((how.at - run.began).total_seconds() for run, how in ends.items())
        pipe.hincrbyfloat(self._worker.key, "total_working_time", seconds)


def _add(pipe: Any, members: Members, *, xx: bool = False) -> None:
    for key, scores in members.items():
        pipe.zadd(key, scores, xx=xx)


def _wip(queue: Queue) -> str:
    return StartedJobRegistry.key_template.format(queue.name)


def _registry(execution: Execution) -> str:
    return ExecutionRegistry.key_template.format(execution.job_id)
