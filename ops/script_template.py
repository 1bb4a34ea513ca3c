"""The script of a scripted model: read, checked, and turned into answers. Shape: see ops.scripted_model.

What a turn says may depend on what the model was told. Strings of the script (never data) that contain
`{{` or `{%` are Jinja2 templates over

    task          the text of the first user message
    turn          how many answers the conversation holds so far: 0 for the first
    results       tool name -> text of that tool's latest result; results["items"] where a name is a dict's method
    results_all   every result in order: {name, text, is_error}

with Jinja2's filters and `from_json`, rendered in a sandbox, undefined names being errors. A string that is one
expression and nothing else gives the expression's own value: "{{ results.count_words | int }}" is a number.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ops.script_wire import error_body
from ops.transcript import blocks_of, first_text, text_of
from worker.errors import InvalidInput

Json = dict[str, Any]

NAMES = {"task", "turn", "results", "results_all"}
USAGE = {"input_tokens": 10, "output_tokens": 5}

_sandbox = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
_sandbox.filters["from_json"] = json.loads


class ScriptError(Exception):
    """A turn cannot say what it is scripted to say: a template found something missing."""


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Fault(_Spec):
    """Something that goes wrong instead of an answer: an error status, or a `kind` of broken transport."""

    status: int | None = Field(default=None, ge=200, le=599)
    kind: Literal["hang", "reset", "truncate", "html", "early_end", "sse_error"] | None = None
    type: str = ""
    message: str = "scripted fault"
    headers: dict[str, str] = {}
    times: int = Field(default=1, ge=1)
    after_events: int | None = Field(default=None, ge=0, description="stream events sent before it happens")

    @model_validator(mode="after")
    def _one_of_both(self) -> Fault:
        if (self.status is None) == (self.kind is None) and self.kind != "html":
            raise ValueError("needs either a status or a kind")
        return self

    @property
    def label(self) -> str:
        return self.kind or str(self.status)

    def error(self) -> Json:
        """The API's error object for it."""
        return error_body(self.status or 529, self.message, self.type)


class Call(_Spec):
    name: str
    input: Json = {}
    id: str | None = None


class Turn(_Spec):
    """One answer of the model."""

    text: str | None = None
    calls: list[Call] = []
    content: list[Json] | None = None
    stop_reason: str | None = None
    stop_details: Json | None = None
    usage: dict[str, Any] = USAGE
    delay_s: float = Field(default=0, ge=0)
    fault: Fault | None = None
    faults: list[Fault] = []
    repeat: bool = False
    when: str | None = Field(default=None, description="a template; where it is false, `otherwise` is answered")
    otherwise: Turn | None = None

    @model_validator(mode="after")
    def _content_once(self) -> Turn:
        if self.content is not None and (self.calls or self.text is not None):
            raise ValueError("content stands alone: leave out text and calls")
        return self

    def fault_at(self, number: int) -> Fault | None:
        """The fault that meets the request with this number (from 0) for this turn, if one is left."""
        for fault in [*([self.fault] if self.fault else []), *self.faults]:
            if number < fault.times:
                return fault
            number -= fault.times
        return None

    def blocks(self) -> list[Json]:
        """The content before rendering; a call without an id has none yet."""
        if self.content is not None:
            return self.content
        text = "done" if self.text is None and not self.calls else self.text
        said = [] if text is None else [{"type": "text", "text": text}]
        return said + [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input} for call in self.calls
        ]


class Script(_Spec):
    """The turns of every conversation whose first message `match` is found in."""

    match: re.Pattern[str] = re.compile(".*", re.DOTALL)
    turns: list[Turn] = Field(min_length=1)

    @model_validator(mode="after")
    def _repeat_last(self) -> Script:
        for index, turn in enumerate(self.turns[:-1]):
            if turn.repeat:
                raise ValueError(f"turns.{index}.repeat: only the last turn can repeat")
        return self

    def turn(self, number: int) -> Turn:
        if number < len(self.turns):
            return self.turns[number]
        return self.turns[-1] if self.turns[-1].repeat else Turn()


class Scripts(_Spec):
    """A whole script file."""

    scripts: list[Script] = Field(min_length=1)

    def find(self, body: Json) -> Script | None:
        text = first_text(body)
        return next((script for script in self.scripts if script.match.search(text)), None)


def load_script(source: Mapping[str, Any] | Path) -> Scripts:
    """Read and check a script. Raises InvalidInput that names the turn."""
    raw = _read(source) if isinstance(source, Path) else source
    if isinstance(raw, Mapping) and "turns" in raw and "scripts" not in raw:
        raw = {"scripts": [raw]}
    try:
        scripts = Scripts.model_validate(raw)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'script'}: {e['msg']}" for e in error.errors()]
        raise InvalidInput(f"The script cannot be played: {'; '.join(lines)}") from None
    for number, script in enumerate(scripts.scripts):
        for index, turn in enumerate(script.turns):
            where = f"scripts.{number}.turns.{index}"
            for problem in _problems(turn):
                raise InvalidInput(f"The script cannot be played: {where}: {problem}")
    return scripts


def choose(turn: Turn, number: int, body: Json) -> Turn:
    """The turn, or what it says for the case that its `when` is false. Raises ScriptError."""
    while turn.when is not None and not _render(turn.when, _context(number, body)):
        turn = turn.otherwise or Turn()
    return turn


def answer(turn: Turn, number: int, body: Json) -> Json:
    """The message that `turn` gives to the request `body`. Raises ScriptError."""
    asked, context = body["messages"][0].get("content"), _context(number, body)
    content = [_render(block, context) for block in turn.blocks()]
    for index, block in enumerate(content):
        if block.get("type") == "tool_use" and block.get("id") is None:
            block["id"] = f"toolu_{digest(asked, number, index)}"
    calls = any(block.get("type") == "tool_use" for block in content)
    message = {
        "id": f"msg_{digest(asked, number)}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model"),
        "content": content,
        "stop_reason": turn.stop_reason or ("tool_use" if calls else "end_turn"),
        "stop_sequence": None,
        "usage": _render(turn.usage, context),
    }
    return message | ({"stop_details": turn.stop_details} if turn.stop_details else {})


def digest(*parts: Any) -> str:
    """Twenty letters that are the same for the same conversation, in whichever process."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"The script {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise InvalidInput(f"The script {path} is not JSON: {error}") from None


def _context(number: int, body: Json) -> Json:
    return {"task": first_text(body), "turn": number, **_results(body["messages"])}


def _problems(turn: Turn) -> Iterator[str]:
    if turn.otherwise:
        yield from _problems(turn.otherwise)
    for text in _strings([turn.blocks(), turn.usage, turn.when]):
        try:
            unknown = meta.find_undeclared_variables(_sandbox.parse(text)) - NAMES
        except TemplateError as error:
            yield f"{text!r}: {error}"
            continue
        for name in sorted(unknown):
            yield f"{text!r}: unknown name {name!r}, expected one of {', '.join(sorted(NAMES))}"
    for block in turn.content or []:
        if not isinstance(block.get("type"), str):
            yield "content: every block needs a type"
    try:
        json.dumps(turn.blocks(), allow_nan=False)
    except (TypeError, ValueError) as error:
        yield f"is not JSON: {error}"


def _strings(value: Any) -> Iterator[str]:
    """Every template in `value`."""
    if isinstance(value, str):
        if "{{" in value or "{%" in value:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _render(value: Any, context: Json) -> Any:
    if isinstance(value, dict):
        return {key: _render(item, context) for key, item in value.items()}
    if isinstance(value, list):
        return [_render(item, context) for item in value]
    if not isinstance(value, str) or ("{{" not in value and "{%" not in value):
        return value
    try:
        expression = _only_expression(value)
        if expression is None:
            return _sandbox.from_string(value).render(context)
        found = _sandbox.compile_expression(expression, undefined_to_none=False)(**context)
        # Through JSON and back: nothing of the request is shared, and what JSON cannot say is refused here.
        return json.loads(json.dumps(found, allow_nan=False, default=_refuse))
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ScriptError(f"{value!r}: {error}") from None


def _refuse(value: Any) -> Any:
    if isinstance(value, StrictUndefined):
        return str(value)  # raises UndefinedError, which says what is missing
    raise TypeError(f"gives a {type(value).__name__}, which is not JSON")


def _only_expression(text: str) -> str | None:
    """The inside of "{{ … }}" if the string is just that."""
    tokens = list(_sandbox.lex(text))
    kinds = [kind for _, kind, _ in tokens]
    if kinds.count("variable_begin") != 1 or kinds[0] != "variable_begin" or kinds[-1] != "variable_end":
        return None
    return "".join(value for _, _, value in tokens[1:-1])


def _results(messages: list[Json]) -> Json:
    names: dict[str, str] = {}
    found: list[Json] = []
    for message in messages:
        names |= {call["id"]: call["name"] for call in blocks_of(message, "tool_use")}
        for result in blocks_of(message, "tool_result"):
            text = text_of(result.get("content", ""))
            name = names.get(result["tool_use_id"], "")
            found.append({"name": name, "text": text, "is_error": bool(result.get("is_error"))})
    return {"results": {item["name"]: item["text"] for item in found}, "results_all": found}
