"""Calling an author's function without mistaking "stop" for "failed"."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from worker.errors import StopRunning, ToolFailure
from worker.tools.output import cut
from worker.tools.plain import clean_text

ERROR_MAX_BYTES = 10_000

FAILURES = (Exception, BaseExceptionGroup, asyncio.CancelledError)
"""What a call may end with that can be the tool's own failure; ask `stop_in` before treating it as one.
CancelledError is here because nobody but the tool's own code can have cancelled what it awaited."""


def call(fn: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """`fn(**arguments)`; a coroutine is run to its end on an event loop of its own."""
    value = fn(**arguments)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def stop_in(error: BaseException, control_flow: tuple[type[BaseException], ...]) -> BaseException | None:
    """The control-flow exception that `error` is, was raised from, or carries in a group; else None.

    Libraries turn whatever interrupts them into their own errors (anthropic's client does so with RQ's
    job timeout), and a TaskGroup wraps it. Both would tell the model about a failure and go on running.
    """
    seen: set[int] = set()
    waiting: list[tuple[BaseException | None, bool]] = [(error, True)]
    while waiting:
        here, raised = waiting.pop()
        if here is None or id(here) in seen:
            continue
        seen.add(id(here))
        if isinstance(here, (StopRunning, *control_flow)):
            return here
        if isinstance(here, BaseExceptionGroup):
            waiting += [(inner, raised) for inner in here.exceptions]
        elif raised and not isinstance(here, FAILURES):
            # SystemExit, KeyboardInterrupt. Only where it is what was raised: a tool may well turn the
            # SystemExit of an argument parser into a failure of its own.
            return here
        waiting += [(here.__cause__, False), (here.__context__, False)]
    return None


def error_text(error: BaseException, max_bytes: int) -> str:
    """What the model reads of a failure: the words of a ToolFailure, else `TypeName: message`."""
    try:
        message = str(error).strip()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        message = "(its message cannot be read)"
    if isinstance(error, ToolFailure):
        text = message or "The tool failed and gave no reason."
    else:
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return cut(clean_text(text), min(max_bytes, ERROR_MAX_BYTES))
