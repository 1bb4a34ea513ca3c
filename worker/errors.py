"""Every error Baton raises, in one tree. The docstring is the message; the data is on the object.

BatonError                     an answer for a person; `exit_code` is what a command ends with
├── InvalidInput               2  the request itself is wrong; nothing was done
├── InvalidSettings            2  a BATON_* variable is wrong
├── RedisUnavailable           3  Redis could not be reached, or refuses what we need
├── TaskNotFound               4  no such task
├── TaskConflict               4  the id is taken by another task
├── WrongState                 4  the task is not in a state that allows this
├── StorageRefused             3  Redis answered, and would not store (full, read-only, disk)
├── ServerUnfit                3  this server would lose tasks: a cluster, or one that evicts keys
├── TaskFault                  this task cannot go on
│   ├── CheckpointDamaged      what is stored cannot be trusted; terminal, bytes untouched
│   ├── CheckpointTooNew       written by a newer Baton; waits for a capable worker
│   └── TaskFailed             raised into RQ so that its dashboard shows the job as failed
├── ModelFault                 the model could not be asked
│   ├── ModelTransient         will pass: wait and ask again
│   ├── ModelConfig            hits every task until a person mends it (key, spend limit, TLS)
│   └── ModelPermanent         this request will never be accepted
└── ToolFailure                a tool says no in words the model can use

StopRunning (BaseException)    control flow, never a tool's error; no `except Exception` sees it
├── LeaseLost                  somebody else owns the task now, or may: write nothing, run nothing
├── CancelRequested            a person asked for the end of this task
├── DrainRequested             this process is to end: let go of the task at a safe point
├── DeadlinePassed             the task's time is over: end it
├── Interrupted                an interruptible tool stopped because it was asked to, and did nothing
└── MustWait                   the task may not go on just now, and needs no worker for waiting
"""

from __future__ import annotations

from typing import Any


class BatonError(Exception):
    """Something a person should read."""

    exit_code = 1


class InvalidInput(BatonError):
    """The request itself is wrong; nothing was done."""

    exit_code = 2


class InvalidSettings(BatonError):
    """A setting is wrong."""

    exit_code = 2


class RedisUnavailable(BatonError):
    """Redis could not be reached."""

    exit_code = 3


class StorageRefused(BatonError):
    """Redis answered, and would not store."""

    exit_code = 3


class ServerUnfit(BatonError):
    """This server would lose tasks, however careful we are."""

    exit_code = 3


class TaskNotFound(BatonError):
    """There is no task {task_id}. `baton tasks` lists them; finished ones are kept for the retention time."""

    exit_code = 4

    def __init__(self, task_id: str) -> None:
        super().__init__((TaskNotFound.__doc__ or "").format(task_id=task_id))
        self.task_id = task_id


class TaskConflict(BatonError):
    """Task id {task_id} is taken by a task with another text or other options; nothing was enqueued."""

    exit_code = 4

    def __init__(self, task_id: str) -> None:
        super().__init__((TaskConflict.__doc__ or "").format(task_id=task_id))
        self.task_id = task_id


class WrongState(BatonError):
    """Task {task_id} is {status}: it cannot be {wanted} now."""

    exit_code = 4

    def __init__(self, task_id: str, status: str, wanted: str) -> None:
        super().__init__((WrongState.__doc__ or "").format(task_id=task_id, status=status, wanted=wanted))
        self.task_id = task_id
        self.status = status


class TaskFault(BatonError):
    """This task cannot go on."""


class CheckpointDamaged(TaskFault):
    """What is stored for the task cannot be trusted. Terminal; the stored bytes stay as they are."""


class CheckpointTooNew(TaskFault):
    """The checkpoint was written by a newer Baton; it waits for a worker that can read it."""


class TaskFailed(TaskFault):
    """The task ended as failed; raised only so that RQ shows its job as failed."""


class ModelFault(BatonError):
    """The model could not be asked. `request_id` is the API's own name for the request, if it gave one."""

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class ModelTransient(ModelFault):
    """Will pass. `retry_after_s`: how long the API asked us to wait, in seconds; None if it did not say. `throttled`:
    it said so to everybody (429, 529), so that asking again from elsewhere would make it worse; `said` is its word for
    it."""

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        retry_after_s: float | None = None,
        throttled: bool = False,
        said: str = "",
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after_s = retry_after_s
        self.throttled = throttled
        self.said = said


class ModelConfig(ModelFault):
    """Hits every task until a person mends it: key, permission, spend limit, TLS, base URL."""


class ModelPermanent(ModelFault):
    """This request will never be accepted, however often it is sent."""


class ToolFailure(BatonError):
    """Raised by a tool to answer the model with an error in its own words."""


class StopRunning(BaseException):
    """Control flow: leave the task at once. Not an Exception, so that no tool's broad except swallows it."""


class LeaseLost(StopRunning):
    """Somebody else owns the task now, or may: write nothing, run nothing more."""


class CancelRequested(StopRunning):
    """A person asked for the end of this task."""


class DrainRequested(StopRunning):
    """This process is to end; the task goes on elsewhere. `abandoned`: a model call was given up for it, which may have
    to be paid for."""

    def __init__(self, why: str, *, abandoned: bool = False) -> None:
        super().__init__(why)
        self.abandoned = abandoned


class Interrupted(StopRunning):
    """An interruptible tool ended early because it was asked to, and declares that the call did nothing which must not
    happen again. Raised by `ToolContext.stop_if_asked`. `undone`: the call, once it is known that no earlier run of it
    may have done something either."""

    def __init__(self, why: str, *, undone: Any = None) -> None:
        super().__init__(why)
        self.undone = undone


class DeadlinePassed(StopRunning):
    """The task's time is over."""


class MustWait(StopRunning):
    """The task may not go on just now: park it. `wait_s` None waits for a person. `waits_for` names what it waits for
    (`api`, `budget:…`, `person`), `ticket` what lets it through then."""

    def __init__(self, reason: str, wait_s: float | None, *, waits_for: str, ticket: str = "") -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.waits_for = waits_for
        self.ticket = ticket
