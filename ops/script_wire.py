"""A message as the Messages API sends it: server-sent events, one JSON document per event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}

Json = dict[str, Any]

# Fields that the API sends in pieces, with the delta that carries them. What is not here comes whole, in
# its block's start event: so do blocks nobody has heard of.
_PIECES = {"text": ("text_delta", 7), "thinking": ("thinking_delta", 11), "signature": ("signature_delta", 0)}
_INPUT_PIECE = 9


def events(message: Json) -> Iterator[Json]:
    """The events of `message`, from message_start to message_stop."""
    usage = message["usage"]
    head = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    head.pop("stop_details", None)
    yield {"type": "message_start", "message": head}
    yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        yield from _block_events(index, block)
    delta = {key: message[key] for key in ("stop_reason", "stop_sequence", "stop_details") if key in message}
    yield {"type": "message_delta", "delta": delta, "usage": usage}
    yield {"type": "message_stop"}


def encode(event: Json) -> bytes:
    """One event on the wire."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def _block_events(index: int, block: Json) -> Iterator[Json]:
    start, deltas = _split(block)
    yield {"type": "content_block_start", "index": index, "content_block": start}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def _split(block: Json) -> tuple[Json, list[Json]]:
    start, deltas = dict(block), []
    if str(block.get("type")).endswith("tool_use") and block.get("input"):
        start["input"] = {}
        for piece in _cut(json.dumps(block["input"]), _INPUT_PIECE):
            deltas.append({"type": "input_json_delta", "partial_json": piece})
    if block.get("type") not in ("text", "thinking"):
        return start, deltas
    for field, (kind, size) in _PIECES.items():
        if isinstance(block.get(field), str):
            start[field] = ""
            deltas += [{"type": kind, field: piece} for piece in _cut(block[field], size)]
    if block.get("citations"):
        start["citations"] = []
        deltas += [{"type": "citations_delta", "citation": citation} for citation in block["citations"]]
    return start, deltas


def _cut(text: str, size: int) -> list[str]:
    """Pieces of `text`; size 0 means all in one, and at least two pieces show that they are put together."""
    if not text or not size:
        return [text] if text else []
    size = max(size, len(text) // 50)
    return [text[at : at + size] for at in range(0, len(text), size)]


def error_body(status: int, message: str, kind: str = "") -> Json:
    """An error as the API writes it."""
    kind = kind or _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
