"""The `@tool` decorator, and a tool as the agent uses it.

    @tool(effect="read_only")
    def price(item: str, context: ToolContext) -> float:
        \"\"\"Look up the price of an item.

        Args:
            item: Its number in the catalogue.
        \"\"\"

A tool without an effect is a side effect: forgetting the mark costs a rerun, guessing it costs a double.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, Literal, overload

from worker.errors import ToolFailure
from worker.tools.calling import FAILURES, call, error_text, stop_in
from worker.tools.context import ToolContext, ToolDefinitionError, ToolResult, Verdict
from worker.tools.effects import Effect
from worker.tools.output import BYTES_MIN, cut, render
from worker.tools.signature import InputRefused, Parameters, describe, label, split_parameters

__all__ = ["Effect", "Tool", "ToolContext", "ToolDefinitionError", "ToolResult", "Verdict", "tool"]

OnUnknown = Literal["report", "hold"]

# An exception is no proof that nothing happened: a read timeout comes after the payment. Only a ToolFailure is.
MAY_HAVE_HAPPENED = "It may have taken effect before it failed. Check what happened before you repeat it."
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Tool:
    """One tool. Calling it calls the function as it was written, so that its author can unit-test it."""

    __name__: str  # as update_wrapper copies it

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        effect: Effect = Effect.SIDE_EFFECT,
        name: str | None = None,
        description: str | None = None,
        verify: Callable[..., Any] | None = None,
        on_unknown: OnUnknown = "report",
        result_max_bytes: int | None = None,
        interruptible: bool = False,
    ) -> None:
        functools.update_wrapper(self, fn)
        _check_callable(fn)
        self.fn = fn
        self.source = label(fn)
        self.name = name or fn.__name__
        if not _NAME.fullmatch(self.name):
            raise ToolDefinitionError(
                f"{self.source}: {self.name!r} is no tool name; use 1 to 64 of the characters a-z A-Z 0-9 _ -"
            )
        self.effect = effect
        self.on_unknown = on_unknown
        self.result_max_bytes = result_max_bytes
        self.interruptible = interruptible
        self.verify = verify
        self._parameters = Parameters(fn, self.name)
        self.input_schema = self._parameters.schema
        self.description = description or describe(self._parameters.doc, self.name.replace("_", " "))
        self._verify_names, self._verify_context = self._check_verify()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Tool {self.name} ({self.effect}) from {self.source}>"

    def definition(self) -> dict[str, Any]:
        """`{"name", "description", "input_schema"}`, plain JSON, the same in every process: it is part of the
        request prefix that is frozen for a task."""
        return {
            "name": self.name,
            "description": self.description,
            "input_schema": copy.deepcopy(self.input_schema),
        }

    def check(self, input: Any) -> ToolResult | None:
        """None if the input fits, else the is_error result for the model. Runs nothing: ask before the start marker."""
        try:
            self._parameters.validate(input)
        except InputRefused as refused:
            return ToolResult(str(refused), is_error=True)
        return None

    def run(self, input: Any, context: ToolContext) -> ToolResult:
        """Run the call. Bad input and failures come back as is_error results; a side effect's failure says that it may
        have happened all the same, unless the tool knows better and raised a ToolFailure.

        Raises only control flow: StopRunning, SystemExit, KeyboardInterrupt, and `context.control_flow`,
        also where a library wrapped it in an error of its own.
        """
        limit = self._limit(context)
        try:
            arguments = self._parameters.validate(input)
            value = call(self.fn, {**arguments, **dict.fromkeys(self._parameters.context_names, context)})
            return _result(value, limit)
        except InputRefused as refused:
            return ToolResult(str(refused), is_error=True)
        except FAILURES as error:
            _raise_stop(error, context)
            words = error_text(error, limit)
            if self.effect is Effect.SIDE_EFFECT and not isinstance(error, ToolFailure):
                words = (
                    cut(words, max(limit - len(MAY_HAVE_HAPPENED.encode()) - 1, BYTES_MIN)) + "\n" + MAY_HAVE_HAPPENED
                )
            return ToolResult(words, is_error=True)

    def ask(self, input: Any, context: ToolContext) -> Verdict:
        """Ask `verify` whether a call that was cut off took effect; its result is JSON-safe content already.

        Whatever is not a clear answer (a failure, another type, no verify at all) is `unknown`.
        Raises what `run` raises.
        """
        if self.verify is None:
            return Verdict.unknown()
        try:
            arguments = self._parameters.validate(input)
            wanted = arguments if self._verify_names is None else {n: arguments[n] for n in self._verify_names}
            answer = call(self.verify, {**wanted, **dict.fromkeys(self._verify_context, context)})
            return self._verdict(answer, self._limit(context))
        except FAILURES as error:
            _raise_stop(error, context)
            return Verdict.unknown()

    def _limit(self, context: ToolContext) -> int:
        return max(self.result_max_bytes or context.result_max_bytes, BYTES_MIN)

    def _verdict(self, answer: Any, limit: int) -> Verdict:
        if isinstance(answer, Verdict):
            if answer.outcome != "happened":
                return answer
            return Verdict.happened(render(answer.result, limit)[0])
        if answer is True:
            words = f"{self.name} did run, as confirmed by verify after a crash; the result itself was lost."
            return Verdict.happened(render(words, limit)[0])
        return Verdict.not_happened() if answer is False else Verdict.unknown()

    def _check_verify(self) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """Which input `verify` takes (None: all of it), and its context parameters; checked now, because the
        first time it is called is after a crash."""
        if self.verify is None:
            return (), ()
        _check_callable(self.verify)
        shown, context = split_parameters(self.verify, for_model=False)
        strange = [
            n for n, p in shown.items() if n not in self._parameters.names and p.default is inspect.Parameter.empty
        ]
        if strange:
            raise ToolDefinitionError(
                f"{label(self.verify)}: parameter `{strange[0]}` is no parameter of {self.source}, which it verifies"
            )
        kinds = {p.kind for p in inspect.signature(self.verify).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return None, context
        return tuple(n for n in shown if n in self._parameters.names), context


@overload
def tool(fn: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *,
    effect: Effect | Literal["read_only", "idempotent", "side_effect"] = ...,
    name: str | None = ...,
    description: str | None = ...,
    verify: Callable[..., Any] | None = ...,
    on_unknown: OnUnknown = ...,
    result_max_bytes: int | None = ...,
    interruptible: bool = ...,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    effect: str = Effect.SIDE_EFFECT,
    name: str | None = None,
    description: str | None = None,
    verify: Callable[..., Any] | None = None,
    on_unknown: OnUnknown = "report",
    result_max_bytes: int | None = None,
    interruptible: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a function, sync or async, a Tool. Works bare and with arguments.

    effect: "read_only", "idempotent" or "side_effect" (the default); see `Effect`.
    name, description: what the model sees; by default the function's name and docstring.
    verify: asked after a crash whether a cut-off call took effect. Takes those of the tool's parameters it
        names, and a ToolContext; returns a Verdict, or True, False, None.
    on_unknown: what to do when nobody can tell: "report" it to the model, or "hold" the task for a person.
    result_max_bytes: cap of this tool's results in UTF-8 bytes (≥ 64), instead of BATON_RESULT_MAX_BYTES.
    interruptible: the tool looks at `context.cancelled`, or calls `context.stop_if_asked()`, so that a worker which
        is to end need not wait for it. Others are waited for, up to BATON_DRAIN_GRACE_S.

    Raises ToolDefinitionError that names the function and what is wrong with it.
    """

    def make(function: Callable[..., Any]) -> Tool:
        where = label(function)
        if effect not in tuple(Effect):
            raise ToolDefinitionError(f"{where}: effect {effect!r} is none of {', '.join(Effect)}")
        if on_unknown not in ("report", "hold"):
            raise ToolDefinitionError(f"{where}: on_unknown {on_unknown!r} is neither report nor hold")
        if result_max_bytes is not None and result_max_bytes < BYTES_MIN:
            raise ToolDefinitionError(f"{where}: result_max_bytes must be at least {BYTES_MIN}")
        return Tool(
            function,
            effect=Effect(effect),
            name=name,
            description=description,
            verify=verify,
            on_unknown=on_unknown,
            result_max_bytes=result_max_bytes,
            interruptible=interruptible,
        )

    return make if fn is None else make(fn)


def _check_callable(fn: Any) -> None:
    if not inspect.isfunction(fn) and not inspect.ismethod(fn):
        raise ToolDefinitionError(f"{fn!r}: only a function can be a tool; options go in as @tool(effect=…)")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        # Calling it would only build the generator: the effect would never happen, and no error would say so.
        raise ToolDefinitionError(f"{label(fn)}: a function that yields cannot be a tool; return a list")


def _result(value: Any, limit: int) -> ToolResult:
    is_error = False
    if isinstance(value, ToolResult):
        value, is_error = value.content, value.is_error
    content, refused = render(value, limit)
    return ToolResult(content, is_error or refused)


def _raise_stop(error: BaseException, context: ToolContext) -> None:
    if (stop := stop_in(error, context.control_flow)) is not None:
        raise stop
