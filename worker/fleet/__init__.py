"""Worker classes for `rq worker -w`.

ForkWorker      a process per task, forked from a parent that has imported everything
ThreadWorker    many tasks in one process
"""

from worker.fleet.fork import ForkWorker
from worker.fleet.start import preload
from worker.fleet.thread import ThreadWorker

__all__ = ["ForkWorker", "ThreadWorker", "preload"]
