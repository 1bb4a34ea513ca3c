"""JSON documents that come back exactly as they went in, or are refused.

orjson alone would not do: it writes NaN as null, refuses integers beyond 64 bits when writing and turns them
into floats when reading. So what orjson cannot carry goes through the standard library, and every
document is read back and compared before it is stored.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import orjson

_LONG_DIGITS = re.compile(rb"\d{19}")


class Unstorable(ValueError):
    """The value would not come back from JSON as it went in."""


def encode(value: Any) -> bytes:
    """UTF-8 JSON of `value`, key order kept; raises Unstorable if it would not read back equal."""
    try:
        data = orjson.dumps(value)
    except TypeError:  # big integer, lone surrogate, more than 254 levels: let the slower one try
        data = _encode_slowly(value)
    try:
        same = decode(data) == value
    except ValueError as error:
        raise Unstorable(f"not readable again as JSON: {error}") from None
    if not same:
        raise Unstorable("changes when it is written as JSON (NaN, a tuple, a key that is no string …)")
    return data


def decode(data: bytes) -> Any:
    """The value of a stored document; raises ValueError if it is not one JSON document."""
    if not _LONG_DIGITS.search(data):
        return orjson.loads(data)
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def digest(value: Any) -> str:
    """128 bits that name a JSON value; equal values in another key order differ, as they do for the model."""
    return hashlib.sha256(encode(value)).hexdigest()[:32]


def _encode_slowly(value: Any) -> bytes:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Unstorable(f"not storable as JSON: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
