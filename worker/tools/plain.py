"""Any Python value as plain JSON types: None, bool, int, float, clean str, list, dict with str keys.

Own code for the containers and pydantic for the leaves, because pydantic's serialiser writes sets in
hash order (another order in every process), drops one of two keys that look alike, and has no bound on
work: a list that holds itself ten times over, ten levels deep, would be written out in full.
"""

from __future__ import annotations

import base64
import re
from collections import deque
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Set, ValuesView
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json, to_jsonable_python

DEPTH_MAX = 100
WORK_MAX = 100_000_000
"""Characters of text plus `NODE_COST` for every value: bounds time and memory at a few seconds and some 100 MB."""
NODE_COST = 40
DIGITS_BITS_MAX = 50_000
"""Longest integer written in decimal: the conversion is quadratic and holds the GIL, and with it the heartbeat."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LISTS = (list, tuple, deque, range, KeysView, ValuesView, ItemsView, Iterator)


class Unprintable(ValueError):
    """The value cannot be written down: it holds itself, is too deep, or too large. The message says which."""


def clean_text(text: str) -> str:
    """`text` that can be encoded: split surrogate pairs joined, each lone surrogate replaced by U+FFFD."""
    if text.isascii():
        return str.__str__(text)
    try:
        text.encode()
    except UnicodeEncodeError:
        # In UTF-16 the two halves of a split pair are neighbours, so decoding joins them by itself.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return str.__str__(text)


def bytes_text(data: bytes) -> str:
    """The text that `data` is, or else base64 with a note of its size in bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"(binary, {len(data)} bytes, base64) {base64.b64encode(data).decode()}"


def json_text(value: Any) -> str:
    """JSON of plain types; NaN and the infinities as the words NaN, Infinity, -Infinity."""
    return to_json(value, inf_nan_mode="constants").decode()


def plain(value: Any) -> Any:
    """`value` as plain JSON types. Raises Unprintable, and whatever the value's own methods raise."""
    return _Walk().plain(value)


class _Walk:
    """One conversion: what is left of its budget, and the containers it is inside of."""

    def __init__(self) -> None:
        self._left = WORK_MAX
        self._inside: set[int] = set()

    def plain(self, value: Any) -> Any:
        self._spend(NODE_COST)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Enum):  # before str and int: many enums are those too
            return self._nested(value, lambda: self.plain(value.value))
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, int):
            return _integer(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._text(bytes_text(bytes(value)))
        return self._nested(value, lambda: self._composite(value))

    def _composite(self, value: Any) -> Any:
        if isinstance(value, BaseModel):
            return self.plain(value.model_dump(warnings=False))
        if is_dataclass(value) and not isinstance(value, type):
            return self._mapping((f.name, getattr(value, f.name, None)) for f in fields(value))
        if isinstance(value, Mapping):
            return self._mapping(value.items())
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._mapping(zip(value._fields, value, strict=True))
        if isinstance(value, _LISTS):
            return [self.plain(item) for item in value]
        if isinstance(value, Set):
            return sorted((self.plain(item) for item in value), key=json_text)
        return self.plain(
            to_jsonable_python(value, inf_nan_mode="constants", fallback=_describe)  # always a smaller value
        )

    def _mapping(self, items: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in items:
            name = self._key(key)
            if name in result:  # 1 and "1" are two keys in Python: lose neither
                name = f"{name} ({type(key).__name__})"
            while name in result:
                name += "*"
            result[name] = self.plain(value)
        return result

    def _key(self, key: Any) -> str:
        name = self.plain(key)
        return name if isinstance(name, str) else json_text(name)

    def _text(self, text: str) -> str:
        self._spend(len(text))
        return clean_text(text)

    def _nested(self, value: Any, convert: Any) -> Any:
        if id(value) in self._inside:
            raise Unprintable("it contains itself")
        if len(self._inside) >= DEPTH_MAX:
            raise Unprintable(f"it is nested deeper than {DEPTH_MAX} levels")
        self._inside.add(id(value))
        try:
            return convert()
        finally:
            self._inside.discard(id(value))

    def _spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise Unprintable("it is too large")


def _integer(value: int) -> int | str:
    if value.bit_length() > DIGITS_BITS_MAX:
        return f"(integer of {value.bit_length()} bits, hexadecimal) {value:#x}"
    return int(value)


def _describe(value: Any) -> str:
    """An object that is no data; its address says nothing to a model and differs in every process."""
    return _ADDRESS.sub("", str(value))
