"""A Python function's parameters as the model sees them, and the model's input as the function wants it."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from docstring_parser import Docstring, ParseError, parse
from pydantic import Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from worker.tools.context import ToolContext, ToolDefinitionError
from worker.tools.output import clean, cut
from worker.tools.plain import clean_text

ERRORS_SHOWN_MAX = 10
_PARAMETER = re.compile(r"[a-zA-Z0-9_]{1,64}")  # what the API allows as a key, less what Python does not
_BROKEN_VALIDATOR = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_SCHEMA_MAPS = ("properties", "$defs", "patternProperties")
_VALUES = ("default", "const", "enum", "examples")


class InputRefused(Exception):
    """The model's input does not fit; the message tells the model what to change."""


class Parameters:
    """`schema`: JSON schema of the input object. `names`: what the model may fill, in order."""

    def __init__(self, fn: Callable[..., Any], tool_name: str) -> None:
        self._tool_name = tool_name
        self.doc = _docstring(fn)
        shown, self.context_names = split_parameters(fn)
        self.names = tuple(shown)
        self._adapter = self._build(fn, shown)
        self.schema: dict[str, Any] = _untitled(self._adapter.json_schema(schema_generator=_Schema))

    def validate(self, raw: Any) -> dict[str, Any]:
        """Keyword arguments for the function, defaults filled in; a deep copy, so that a tool that changes its
        arguments does not change the conversation. Raises InputRefused."""
        if not isinstance(raw, dict):
            raise InputRefused(self._refusal([f"the input must be a JSON object, not {_shown(raw)}"]))
        try:
            arguments: dict[str, Any] = self._adapter.validate_python(clean(raw))
        except ValidationError as error:
            problems = [self._problem(e) for e in error.errors(include_url=False, include_context=False)]
            raise InputRefused(self._refusal(problems)) from None
        except _BROKEN_VALIDATOR as error:  # also input that is nested too deeply
            raise InputRefused(self._refusal([clean_text(f"{type(error).__name__}: {error}")])) from None
        return arguments

    def _build(self, fn: Callable[..., Any], shown: Mapping[str, inspect.Parameter]) -> TypeAdapter[Any]:
        described = {p.arg_name: p.description for p in self.doc.params if p.description}
        final = {
            name: parameter.replace(
                annotation=_described(parameter.annotation, described.get(name)),
                kind=inspect.Parameter.KEYWORD_ONLY,
            )
            for name, parameter in shown.items()
        }
        for name, parameter in final.items():  # one by one, because pydantic does not say which one it refuses
            try:
                _adapter({name: parameter}).json_schema(schema_generator=_Schema)
            except (PydanticUserError, TypeError, ValueError, NameError) as error:
                reason = str(error).partition("\n")[0]
                raise ToolDefinitionError(
                    f"{label(fn)}: parameter `{name}` cannot be offered to a model: {reason}"
                ) from error
        return _adapter(final)

    def _problem(self, error: Any) -> str:
        where, kind = ".".join(map(str, error["loc"])), error["type"]
        if kind == "missing_keyword_only_argument":
            return f"{where}: missing, but required"
        if kind == "unexpected_keyword_argument":
            return f"{where}: no such parameter; this tool takes: {', '.join(self.names) or 'nothing'}"
        got = "" if kind == "missing" else f"; got {_shown(error['input'])}"
        return f"{where}: {error['msg']}{got}"

    def _refusal(self, problems: list[str]) -> str:
        left_out = len(problems) - ERRORS_SHOWN_MAX
        lines = problems[:ERRORS_SHOWN_MAX] + ([f"… and {left_out} more"] if left_out > 0 else [])
        text = "\n- ".join([f"The input does not fit the tool {self._tool_name}; it was not run.", *lines])
        return cut(clean_text(text), 10_000)


def label(fn: Callable[..., Any]) -> str:
    """Where a function was written: `module.function`."""
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"


def split_parameters(
    fn: Callable[..., Any], *, for_model: bool = True
) -> tuple[dict[str, inspect.Parameter], tuple[str, ...]]:
    """The parameters with resolved annotations, and the names of those that take the ToolContext.

    Raises ToolDefinitionError that names function and parameter for anything a call by name, from JSON,
    cannot fill. Not `for_model` (a verify function): annotations are optional and a `**kwargs` is left out.
    """
    hints = _hints(fn)
    shown: dict[str, inspect.Parameter] = {}
    context: list[str] = []
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and not for_model:
            continue
        where = f"{label(fn)}: parameter `{name}`"
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ToolDefinitionError(f"{where} takes any number of values; name each one")
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ToolDefinitionError(f"{where} is positional-only; tools are called by name")
        if for_model and name not in hints:
            raise ToolDefinitionError(f"{where} has no type annotation")
        hint = hints.get(name, Any)
        if hint is ToolContext or ToolContext in typing.get_args(hint):
            context.append(name)
        elif not _PARAMETER.fullmatch(name):
            raise ToolDefinitionError(f"{where}: the API allows only letters, digits and _ in names, at most 64")
        else:
            shown[name] = parameter.replace(annotation=hint)
    return shown, tuple(context)


def describe(doc: Docstring, fallback: str) -> str:
    """What the model reads about a tool: the docstring without its parameters, which stand in the schema."""
    parts = [doc.short_description, doc.long_description]
    if doc.returns and doc.returns.description:
        parts.append(f"Returns: {doc.returns.description}")
    parts += [f"Example: {example.description}" for example in doc.examples if example.description]
    return "\n\n".join(part.strip() for part in parts if part and part.strip()) or fallback


def _docstring(fn: Callable[..., Any]) -> Docstring:
    text = inspect.getdoc(fn) or ""
    try:
        return parse(text)
    except ParseError:  # not one of the known styles: all of it is description
        doc = Docstring()
        doc.short_description = text
        return doc


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        missing = getattr(error, "name", None) or ""
        parameters = inspect.signature(fn).parameters.values()
        names = [p.name for p in parameters if missing and missing in str(p.annotation)]
        where = f"parameter `{'`, `'.join(names)}`" if names else "an annotation"
        raise ToolDefinitionError(f"{label(fn)}: {where} cannot be resolved: {error}") from error


def _described(hint: Any, description: str | None) -> Any:
    if not description:
        return hint
    note = Field(description=description)
    if typing.get_origin(hint) is Annotated:  # the author's own Field stands behind ours, so it wins
        inner, *metadata = typing.get_args(hint)
        return Annotated[(inner, note, *metadata)]
    return Annotated[hint, note]


def _adapter(parameters: Mapping[str, inspect.Parameter]) -> TypeAdapter[Any]:
    """pydantic's own validation of a call, on a stand-in that hands the arguments back instead of acting.

    A model class would do too, but it forbids parameters called `json`, `copy` or `_x`.
    """

    def collect(**arguments: Any) -> dict[str, Any]:
        return arguments

    stand_in: Any = collect
    stand_in.__signature__ = inspect.Signature(list(parameters.values()))
    stand_in.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    return TypeAdapter(stand_in)


class _Schema(GenerateJsonSchema):
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  pydantic's own name


def _untitled(schema: Any) -> Any:
    """The schema without titles: pydantic makes them from the names, and the model pays for each."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if key in _SCHEMA_MAPS:
            result[key] = {name: _untitled(item) for name, item in value.items()}
        elif key in _VALUES:
            result[key] = value
        elif key != "title":
            result[key] = _untitled(value)
    return result


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 1000 else "a very long integer"
    return text if len(text) <= 100 else text[:100] + "…"
