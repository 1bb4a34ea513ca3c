"""What a tool returned, as content that the model is given and the ledger keeps.

Whatever goes in, what comes out survives JSON unchanged, so that a resumed conversation equals the live
one byte for byte; it is never empty or blank (the API refuses such text for ever), and it is bounded.
"""

from __future__ import annotations

import binascii
from typing import Any

from worker.tools.plain import DEPTH_MAX, Unprintable, bytes_text, clean_text, json_text, plain

Content = str | list[dict[str, Any]]

BYTES_MIN = 64
"""Smallest cap: room for the cut mark."""
MEDIA_MAX_BYTES = 5_000_000
"""Images and documents cannot be cut, so they have a bound of their own, as JSON."""

_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_SOURCE_KEYS = {
    "base64": {"media_type", "data"},
    "url": {"url"},
    "file": {"file_id"},
    "text": {"media_type", "data"},
}


def to_content(value: Any, max_bytes: int) -> Content:
    """Content for any `value`; its text, cut mark included, has at most `max_bytes` (≥ 64) UTF-8 bytes.

    str and bytes become text, a list of content blocks stays a list, everything else becomes JSON text.
    What cannot be written down becomes a sentence that says so. Raises only what the value's own methods raise.
    """
    return render(value, max_bytes)[0]


def render(value: Any, max_bytes: int) -> tuple[Content, bool]:
    """`to_content`, and whether the value could not be shown."""
    if max_bytes < BYTES_MIN:
        raise ValueError(f"max_bytes must be at least {BYTES_MIN}")
    try:
        if _are_blocks(value):
            return _blocks(plain(value), max_bytes), False
        return cut(_visible(_text(value)), max_bytes), False
    except (ValueError, TypeError, RecursionError) as error:
        return cut(f"The tool ran, but its output cannot be shown: {clean_text(str(error))}", max_bytes), True


def clean(value: Any) -> Any:
    """A deep copy of JSON-like data with every string, keys too, made encodable. Raises Unprintable past 100 levels."""
    return _clean(value, 0)


def cut(text: str, max_bytes: int) -> str:
    """`text`, or as much of its start as fits with a visible mark into `max_bytes`; cut between code points."""
    raw = text.encode()
    if len(raw) <= max_bytes:
        return text
    room = max_bytes - len(_mark(len(raw), len(raw)).encode())
    kept = raw[: max(room, 0)].decode("utf-8", "ignore")
    return kept + _mark(len(kept.encode()), len(raw))


def _mark(shown: int, total: int) -> str:
    return f"… [cut: {shown} of {total} bytes shown]"


def _text(value: Any) -> str:
    if value is None:
        return "(no output)"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes_text(bytes(value))
    if type(value) is str:  # no budget here: one long string costs little, and is cut
        return clean_text(value)
    result = plain(value)
    return result if isinstance(result, str) else json_text(result)


def _visible(text: str) -> str:
    if not text:
        return "(empty output)"
    return "(output of white space only)" if text.isspace() else text


def _clean(value: Any, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise Unprintable(f"it is nested deeper than {DEPTH_MAX} levels")
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {_clean(key, depth + 1): _clean(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item, depth + 1) for item in value]
    return value


def _are_blocks(value: Any) -> bool:
    """True for blocks of exactly the API's shape. Anything near it is a tool's own data and becomes JSON text:
    one block the API does not know would make every later request of the task fail."""
    return isinstance(value, list) and bool(value) and all(_is_block(item) for item in value)


def _is_block(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    kind, keys = item.get("type"), set(item)
    if kind == "text":
        return keys == {"type", "text"} and isinstance(item["text"], str)
    if kind == "image":
        return keys == {"type", "source"} and _is_source(item["source"], ("base64", "url", "file"))
    if kind == "document":
        named = all(isinstance(item.get(key, ""), str) for key in ("title", "context"))
        known = {"type", "source"} <= keys <= {"type", "source", "title", "context"}
        return known and named and _is_source(item["source"], tuple(_SOURCE_KEYS))
    return False


def _is_source(source: Any, kinds: tuple[str, ...]) -> bool:
    if not isinstance(source, dict) or source.get("type") not in kinds:
        return False
    wanted = _SOURCE_KEYS[source["type"]]
    return set(source) == wanted | {"type"} and all(isinstance(source[key], str) for key in wanted)


def _blocks(blocks: list[dict[str, Any]], max_bytes: int) -> list[dict[str, Any]]:
    media = [block for block in blocks if block["type"] != "text"]
    for block in media:
        _check_media(block)
    size = len(json_text(media))
    if size > MEDIA_MAX_BYTES:
        raise Unprintable(f"its images and documents have {size} bytes; at most {MEDIA_MAX_BYTES} are allowed")
    texts = [block for block in blocks if block["type"] == "text"]
    if sum(len(block["text"].encode()) for block in texts) + BYTES_MIN * len(texts) <= max_bytes:
        share = max_bytes
    else:  # too much in all: the same share for each, so that each shows its start
        share = max_bytes // max(len(texts), 1)
    if texts and share < BYTES_MIN:
        raise Unprintable(f"it has {len(texts)} text blocks, too many for {max_bytes} bytes")
    for block in texts:
        block["text"] = cut(_visible(block["text"]), share)
    return blocks


def _check_media(block: dict[str, Any]) -> None:
    source = block["source"]
    if source["type"] != "base64":
        return
    allowed = _IMAGE_TYPES if block["type"] == "image" else ("application/pdf",)
    if source["media_type"] not in allowed:
        raise Unprintable(f"a {block['type']} of type {source['media_type']!r}; allowed: {', '.join(allowed)}")
    try:
        data = binascii.a2b_base64(source["data"], strict_mode=True)
    except ValueError:  # binascii.Error, and non-ASCII text
        data = b""
    if not data:
        raise Unprintable(f"the data of a {block['type']} is not base64")
