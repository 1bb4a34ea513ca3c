"""What goes into a tool call beside the model's input, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from worker.errors import BatonError, Interrupted
from worker.settings import Settings


class ToolDefinitionError(BatonError):
    """A tool, or a module with tools, cannot be used as it is written. Raised at load, before any task."""

    exit_code = 2


def _never() -> bool:
    return False


@dataclass(frozen=True)
class ToolContext:
    """Passed to every parameter annotated `ToolContext`; the model neither sees nor fills it.

    `idempotency_key` is the same for every run of one call, over every resume: hand it to whatever
    service the tool talks to. `deadline`: the `time.monotonic()` after which the task asks the model nothing more, if
    it has one; a call that still runs then is not interrupted. `result_max_bytes` counts UTF-8 bytes. `control_flow`
    names exception classes that are not errors of the tool although they derive from Exception (RQ's job timeout).
    """

    task_id: str
    call_id: str
    tool: str
    turn: int
    attempt: int
    epoch: int
    idempotency_key: str
    workspace: Path
    result_max_bytes: int
    settings: Settings
    control_flow: tuple[type[BaseException], ...] = ()
    should_stop: Callable[[], bool] = _never
    deadline: float | None = None
    draining: Callable[[], bool] = _never
    interruptible: bool = False

    @property
    def cancelled(self) -> bool:
        """True once this call should come to an end: the task was cancelled, or its lease is lost; for an interruptible
        tool also once the worker is to end. (Any other tool is waited for then, up to BATON_DRAIN_GRACE_S.)"""
        return self.should_stop() or (self.interruptible and self.draining())

    def stop_if_asked(self) -> None:
        """For a tool marked `interruptible`: end the call here if it should come to an end. By calling this the tool
        declares that it has so far done nothing which must not happen again: at a drain the call is run anew by the
        next worker, as if it had never started; a cancelled task records that it was not executed. Call it before the
        effect or between steps that may be repeated, never after a step that may not.

        Does nothing for a tool that is not interruptible. Raises Interrupted, which no `except Exception` sees.
        """
        if self.interruptible and self.cancelled:
            raise Interrupted(f"{self.tool} was interrupted")


@dataclass(frozen=True)
class ToolResult:
    """What the model gets: JSON-safe, never empty, at most the call's `result_max_bytes` of text.

    `content` is text, or a list of `text`, `image` and `document` blocks.
    """

    content: str | list[dict[str, Any]]
    is_error: bool = False


@dataclass(frozen=True)
class Verdict:
    """A verify function's answer to "did this call take effect before the crash?".

    `result` stands in for the lost result of a call that happened.
    """

    outcome: Literal["happened", "not_happened", "unknown"]
    result: Any = None

    @classmethod
    def happened(cls, result: Any) -> Verdict:
        return cls("happened", result)

    @classmethod
    def not_happened(cls) -> Verdict:
        return cls("not_happened")

    @classmethod
    def unknown(cls) -> Verdict:
        return cls("unknown")
