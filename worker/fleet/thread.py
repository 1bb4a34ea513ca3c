"""`rq worker -w worker.fleet.ThreadWorker agents`: up to BATON_CONCURRENCY tasks in one process, a thread each.

Agents wait for the model nearly all the time; a thread that waits costs a tenth of a megabyte. For RQ it is one worker
with many executions. If it is killed, all its tasks are recovered like anybody's: each has an owner and a lease.

    main thread     signals, the end
    intake          takes jobs while there is room (threads_intake)
    books           tells RQ what begins and ends (threads_books)
    leases          keeps the leases of all (worker.leases)
    task, …         one attempt each (threads_tasks)

Told to end, it takes no more, and each task is handed over at its next safe point; what is still inside a tool shortly
before the grace is over is taken from its thread. Exit code 0, whether such threads still run or not.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from rq.command import parse_payload
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.job import Job
from rq.queue import Queue
from rq.utils import now
from rq.worker import BaseWorker, DequeueStrategy

from worker import drain
from worker.children import children_end_with_us, end_left_behind
from worker.crashpoints import check_crash_after
from worker.errors import BatonError
from worker.fleet.base import BatonWorker
from worker.fleet.start import start
from worker.fleet.threads_loop import POP_S, Limits, Loop
from worker.fleet.threads_tasks import CONNECTIONS_MAX
from worker.log import event
from worker.settings import Settings

if TYPE_CHECKING:
    from worker.model import Model

log = logging.getLogger(__name__)

SPARE_FILES = 128


class ThreadWorker(BatonWorker, BaseWorker):
    """`rq worker -w worker.fleet.ThreadWorker agents`."""

    _loop: Loop

    def make_model(self, settings: Settings) -> Model:
        """The one client all tasks share."""
        from worker.model import Claude  # late: it imports anthropic

        return Claude(settings)

    @property
    def dequeue_timeout(self) -> int:
        return POP_S

    def work(
        self,
        burst: bool = False,
        logging_level: str | None = None,
        date_format: str = DEFAULT_LOGGING_DATE_FORMAT,
        log_format: str = DEFAULT_LOGGING_FORMAT,
        max_jobs: int | None = None,
        max_idle_time: int | None = None,
        with_scheduler: bool = False,
        dequeue_strategy: DequeueStrategy = DequeueStrategy.DEFAULT,
    ) -> bool:
        """As RQ's, for as many tasks at once as there is room for. Ends the process if threads still run at the end,
        or if a part of it has failed (exit code 1)."""
        check_crash_after()
        self.be_ready(start())
        drain.begin_anew()
        room_for_files(self.settings.concurrency)
        self._dequeue_strategy = dequeue_strategy
        end_left_behind()
        self._loop = loop = Loop(self, Limits(burst, max_jobs, max_idle_time))
        self._install_signal_handlers()  # type: ignore[no-untyped-call]  # untyped in rq 3.0
        with children_end_with_us():
            self.bootstrap(logging_level, date_format, log_format)
            if with_scheduler:
                self._start_scheduler(burst, logging_level, date_format, log_format)
            loop.run()
        if loop.left_running:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(loop.code)  # a thread in a tool would be waited for, or go on meanwhile
        if loop.code:
            sys.exit(loop.code)
        return loop.taken > 0

    def execute_job(self, job: Job, queue: Queue) -> None:
        raise NotImplementedError  # one by one is what this worker does not do

    # -- told to end, or to stop a job -------------------------------------------------------------------------

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM and SIGINT. A second one changes nothing."""
        if not drain.PROCESS.asked:
            self._shutdown_requested_date = now()
        self._loop.ask(f"its worker got {signal.Signals(signum).name}")

    request_force_stop = request_stop

    def handle_payload(self, message: Any) -> None:
        """In the thread that listens for RQ's commands; nothing may end it."""
        try:
            payload = parse_payload(message)
            match payload.get("command"):
                case "stop-job" | "stop-execution":
                    self._stop_job(str(payload.get("job_id")))
                case "kill-horse":
                    event(log, "no-horse", why="this worker has none; send stop-job")
                case _:
                    super().handle_payload(message)
        except Exception as error:
            event(log, "command-failed", level=logging.WARNING, why=repr(error))

    def _stop_job(self, job_id: str) -> None:
        try:
            found = self._loop.tasks.stop(job_id)
        except BatonError as error:
            event(log, "not-stopped", level=logging.WARNING, job=job_id, why=error)
        else:
            event(log, "stopping" if found else "not-running", job=job_id)

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        event(log, "commands-not-heard", level=logging.WARNING, why=exc)
        time.sleep(2.0)


def room_for_files(concurrency: int) -> None:
    """Each task that waits for the model has a socket, and its tools may open something."""
    wanted = 2 * concurrency + CONNECTIONS_MAX + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < wanted:
        soft = wanted if hard == unlimited else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != unlimited and soft < wanted:
        why = f"{concurrency} tasks at once may open {wanted} files, and this process may open {soft} (ulimit -Hn)"
        event(log, "few-files", level=logging.WARNING, why=f"{why}: raise the limit, or lower BATON_CONCURRENCY")
