"""A message put together from the raw events of its stream, as plain JSON values: nothing is lost or added.

The SDK's own accumulator drops delta types it does not know, parses the growing tool input again at every
delta, and turns a cut-off one into `{}` without a word. This one needs no model of any block type: a block
is what its start event says plus its deltas; ints stay ints of any size.
"""

from __future__ import annotations

import json
from typing import Any

from worker.errors import ModelTransient


class UnknownDelta(Exception):
    """The stream holds a delta of a type this code cannot apply: ask for the whole message instead."""


def loads(text: str) -> Any:
    """JSON of the model or the API; ModelTransient if it is none (NaN, which could not be sent back, too)."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise ModelTransient("The model's answer was garbled: not valid JSON.") from None


def _refuse(name: str) -> Any:
    raise ValueError(name)


class Accumulator:
    """Feed it every event in order; `message` is complete once `finished`."""

    def __init__(self) -> None:
        self._message: dict[str, Any] | None = None
        self._inputs: dict[int, list[str]] = {}
        self.finished = False

    def feed(self, event: Any) -> None:
        """Apply one event. Types of events we do not know are skipped, as the API asks its clients to do."""
        try:
            self._apply(event)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ModelTransient("The model's stream was garbled: its events do not fit together.") from None

    def message(self) -> dict[str, Any]:
        """The message so far. Raises ModelTransient if it is not all there, or a call's input is unreadable."""
        if self._message is None:
            raise ModelTransient("The model's answer was an empty stream.")
        if not self.finished or self._message.get("stop_reason") is None:
            raise ModelTransient("The model's stream ended before its message did.")
        for index, parts in self._inputs.items():
            self._finish_input(index, "".join(parts))
        return self._message

    def _apply(self, event: Any) -> None:
        kind = event["type"]
        if kind == "message_start":
            self._message = event["message"]
        elif kind == "content_block_start":
            if self._content is None or event["index"] != len(self._content):
                raise IndexError
            self._content.append(event["content_block"])
        elif kind == "content_block_delta":
            self._apply_delta(event["index"], event["delta"])
        elif kind == "message_delta":
            self._apply_message_delta(event)
        elif kind == "message_stop":
            self.finished = True

    @property
    def _content(self) -> list[dict[str, Any]] | None:
        return None if self._message is None else self._message["content"]

    def _apply_delta(self, index: int, delta: dict[str, Any]) -> None:
        if self._content is None:
            raise IndexError
        block = self._content[index]
        match delta["type"]:
            case "text_delta":
                block["text"] = (block.get("text") or "") + delta["text"]
            case "input_json_delta":
                self._inputs.setdefault(index, []).append(delta["partial_json"])
            case "thinking_delta":
                block["thinking"] = (block.get("thinking") or "") + delta["thinking"]
            case "signature_delta":
                block["signature"] = delta["signature"]
            case "citations_delta":
                block["citations"] = [*(block.get("citations") or []), delta["citation"]]
            case "compaction_delta":
                block.update((key, value) for key, value in delta.items() if key != "type")
            case unknown:
                raise UnknownDelta(unknown)

    def _apply_message_delta(self, event: dict[str, Any]) -> None:
        if self._message is None:
            raise IndexError
        self._message.update((event.get("delta") or {}).items())
        # Counts are totals, not increments; what is absent or null keeps the value of message_start.
        counts = {key: value for key, value in (event.get("usage") or {}).items() if value is not None}
        self._message["usage"] = {**(self._message.get("usage") or {}), **counts}

    def _finish_input(self, index: int, text: str) -> None:
        if self._message is None or not text:
            return
        try:
            self._message["content"][index]["input"] = loads(text)
        except ModelTransient:
            # Cut off by max_tokens the call never runs, so `{}` from its start may stay; else ask again.
            if self._message["stop_reason"] in ("tool_use", "pause_turn"):
                raise ModelTransient("The model wrote a tool call whose input is not valid JSON.") from None
