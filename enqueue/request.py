"""What a client may ask for. Everything is checked before Redis is spoken to; each refusal says what is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from enqueue.ids import checked_id, new_id
from worker.errors import InvalidInput
from worker.state.task import NewTask

if TYPE_CHECKING:  # importing pydantic would make `enqueue-task --help` slow
    from worker.settings import Settings

DEDUPE_KEY_MAX = 200
MODEL_MAX = 200
TAG_MAX, TAGS_MAX = 100, 20
TOOLS_MAX = 200
TURNS_MAX = 100_000
TOKENS_MAX = 2**53
DELAY_MAX_S = 3_660 * 86_400  # ten years: anything longer is a slip of the unit
CONCURRENCY_KEY_MAX, CONCURRENCY_MAX = 100, 10_000

_QUEUE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOOL = re.compile(r"[A-Za-z0-9_-]{1,64}")


def new_task(
    settings: Settings,
    text: str,
    *,
    task_id: str | None = None,
    dedupe_key: str | None = None,
    queue: str | None = None,
    model: str | None = None,
    system: str | None = None,
    turns_max: int | None = None,
    tokens_max: int | None = None,
    tools: Iterable[str] | None = None,
    tags: Iterable[str] = (),
    delay_s: float = 0,
    deadline_s: float | None = None,
    concurrency_key: str | None = None,
    concurrency: int | None = None,
) -> NewTask:
    """The checked request. Raises InvalidInput."""
    delay_ms = _milliseconds("the delay", delay_s)
    key, places = _places(concurrency_key, concurrency)
    return NewTask(
        task_id=new_id() if task_id is None else checked_id(task_id),
        text=_text(text, settings.text_max_bytes),
        queue=settings.queue if queue is None else _queue(queue),
        model="" if model is None else _label("model", model, MODEL_MAX),
        system="" if system is None else checked_text("the system prompt", system, settings.text_max_bytes),
        turns_max=settings.turns_max if turns_max is None else _whole("turns_max", turns_max, TURNS_MAX),
        tokens_max=None if tokens_max is None else _whole("tokens_max", tokens_max, TOKENS_MAX),
        tools=None if tools is None else _tools(tools),
        tags=_tags(tags),
        dedupe_key=None if dedupe_key is None else _label("the dedupe key", dedupe_key, DEDUPE_KEY_MAX),
        delay_ms=delay_ms,
        deadline_ms=None if deadline_s is None else deadline_ms(deadline_s, delay_ms),
        concurrency_key=key,
        concurrency=places,
    )


def deadline_ms(deadline_s: object, delay_ms: int = 0) -> int:
    """A deadline that a task can meet: counted from now, like its delay. Raises InvalidInput."""
    found = _milliseconds("the deadline", deadline_s)
    if found <= delay_ms:
        raise InvalidInput("the deadline must be more than 0 seconds, and later than the delay")
    return found


def checked_text(what: str, text: object, bytes_max: int) -> str:
    """`text`, if it can be stored and sent: UTF-8, no NUL, at most `bytes_max` bytes."""
    if not isinstance(text, str):
        raise InvalidInput(f"{what} must be a string, not {type(text).__name__}")
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidInput(f"{what} is not valid UTF-8") from None
    if length > bytes_max:
        raise too_long(what, str(length), bytes_max)
    if "\0" in text:
        raise InvalidInput(f"{what} holds a NUL character")
    return text


def too_long(what: str, length: str, bytes_max: int) -> InvalidInput:
    return InvalidInput(f"{what} has {length} bytes; at most {bytes_max} are accepted (BATON_TEXT_MAX_BYTES)")


def _text(text: object, bytes_max: int) -> str:
    checked = checked_text("the text", text, bytes_max)
    if not checked.strip():
        raise InvalidInput("the text is empty" if not checked else "the text is blank: only white space")
    return checked


def _queue(queue: object) -> str:
    if not isinstance(queue, str) or not _QUEUE.fullmatch(queue):
        raise InvalidInput(f"{str(queue)[:80]!a} is no queue name: 1 to 64 letters, digits, _, . or -")
    return queue


def _label(what: str, value: object, length_max: int) -> str:
    """One printable line that is not blank."""
    if not isinstance(value, str) or not value.isprintable() or not value.strip() or len(value) > length_max:
        raise InvalidInput(f"{what} must be 1 to {length_max} printable characters, not {str(value)[:80]!a}")
    return value


def _whole(what: str, value: object, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidInput(f"{what} must be a whole number from 1 to {most}, not {str(value)[:80]!a}")
    return value


def _tools(tools: Iterable[str]) -> tuple[str, ...]:
    names = _several("tools", tools, TOOLS_MAX)
    for name in names:
        if not isinstance(name, str) or not _TOOL.fullmatch(name):
            raise InvalidInput(f"{str(name)[:80]!a} is no tool name: 1 to 64 letters, digits, _ or -")
    return names


def _tags(tags: Iterable[str]) -> tuple[str, ...]:
    return tuple(_label("a tag", tag, TAG_MAX) for tag in _several("tags", tags, TAGS_MAX))


def _several(what: str, values: Iterable[str], most: int) -> tuple[str, ...]:
    """Each value once, in order. A lone string is refused: it would pass for a list of letters."""
    if isinstance(values, str | bytes):
        raise InvalidInput(f"{what} must be a list of strings, not one string")
    try:
        found = tuple(dict.fromkeys(values))
    except TypeError:
        raise InvalidInput(f"{what} must be a list of strings, not {str(values)[:80]!a}") from None
    if len(found) > most:
        raise InvalidInput(f"{len(found)} {what}; at most {most} are accepted")
    return found


def _places(key: str | None, number: int | None) -> tuple[str, int]:
    if key is None and number is None:
        return "", 0
    if key is None or number is None:
        raise InvalidInput("the concurrency key and the concurrency go together: say both or neither")
    return (
        _label("the concurrency key", key, CONCURRENCY_KEY_MAX),
        _whole("the concurrency", number, CONCURRENCY_MAX),
    )


def _milliseconds(what: str, seconds: object) -> int:
    good = isinstance(seconds, int | float) and not isinstance(seconds, bool) and math.isfinite(seconds)
    if not good or not 0 <= float(seconds) <= DELAY_MAX_S:  # type: ignore[arg-type]  # a number, by the line above
        raise InvalidInput(f"{what} must be 0 to {DELAY_MAX_S} seconds, not {str(seconds)[:80]!a}")
    return math.ceil(float(seconds) * 1000)  # type: ignore[arg-type]
