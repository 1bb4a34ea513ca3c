"""Processes forked from one that has imported everything, made into what a process started by hand would be.

Starting a worker costs 2 to 3 seconds of imports and 70 MiB of its own memory; a fork costs neither. The parent must
have started no thread and opened no connection: a fork would inherit half of either.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from worker.settings import Settings

WORKER_CLASSES = {"fork": "worker.fleet.ForkWorker", "thread": "worker.fleet.ThreadWorker", "stock": "rq.Worker"}

# A parent that handles one of these blocks it while it forks, so that its handler does not swallow what is meant for
# the fork.
HELD_BACK = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def preload(settings: Settings) -> None:
    """All that a worker or a work-horse imports, and RQ's command line; `freeze` when nothing more is to come.
    Raises ToolDefinitionError."""
    import rq.cli  # noqa: F401  # late: this costs seconds, and whoever only reads a name from here need not pay

    import worker.fleet

    worker.fleet.preload(settings)


def freeze() -> None:
    """No garbage collector of a fork touches what is loaded now, so that all of them share its pages."""
    gc.collect()
    gc.freeze()


def become(
    command: Callable[[], int], *, log: Path | None = None, environ: Mapping[str, str] | None = None
) -> NoReturn:
    """In the fork: a session, a log (None: the parent's), an environment and signals of its own, then the command.
    Never returns; the exit code is the command's."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in HELD_BACK:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
        _redirect(log)
        os.environ.update(environ or {})
        random.seed()  # or all forks would wait for the same jitter
        code = command()
    except SystemExit as over:
        code = over.code if isinstance(over.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def rq_worker(worker_class: str, queue: str, url: str) -> NoReturn:
    """RQ's own command line; ends with SystemExit."""
    from rq.cli.cli import main  # `rq worker` is registered there by then: `preload` has imported rq.cli

    # Of all this nothing shows in `ps`: a fork keeps the command line of its parent.
    main.main(["worker", queue, "-u", url, "-w", worker_class], prog_name="rq")


def _redirect(log: Path | None) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if log is not None:
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for target in (1, 2):
            os.dup2(out, target)
        os.close(out)
