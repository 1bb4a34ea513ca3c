"""What is known about a call: its ledger entry (it ran, this came back) and its start marker (it may have run)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from worker.state.codec import decode, encode


@dataclass(frozen=True)
class Call:
    """One tool_use block of a response. `turn` is the number of the response that holds it, from 1."""

    turn: int
    id: str
    name: str
    input: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """Proof that a call ran. `content`: what its tool_result holds, text or content blocks."""

    name: str
    input_digest: str
    content: str | list[dict[str, Any]]
    is_error: bool
    epoch: int
    at_ms: int = 0

    def dump(self, at_ms: int) -> bytes:
        document = {
            "name": self.name,
            "inputDigest": self.input_digest,
            "result": self.content,
            "isError": self.is_error,
            "epoch": self.epoch,
            "atMs": at_ms,
        }
        return encode(document)

    @classmethod
    def load(cls, data: bytes) -> Entry:
        """Raises ValueError, KeyError or TypeError where `data` is not an entry."""
        raw = decode(data)
        return cls(raw["name"], raw["inputDigest"], raw["result"], raw["isError"], raw["epoch"], raw["atMs"])


@dataclass(frozen=True)
class Marker:
    """A call may have run from here on, under this epoch, with this effect (a deploy may change the tool's).
    `holder_gone`: the process that wrote it is proven dead; else it may still be about to run the call."""

    epoch: int
    effect: str = "side_effect"
    at_ms: int = 0
    holder_gone: bool = True

    def dump(self, at_ms: int) -> bytes:
        return encode({"epoch": self.epoch, "effect": self.effect, "atMs": at_ms})

    @classmethod
    def load(cls, data: bytes) -> Marker:
        """Raises ValueError, KeyError or TypeError where `data` is not a marker."""
        raw = decode(data)
        return cls(raw["epoch"], raw["effect"], raw["atMs"])


@dataclass(frozen=True)
class Resolution:
    """A person's word about a call whose outcome nobody else can tell. `text`: its result, if it happened."""

    outcome: Literal["happened", "not_happened", "report"]
    text: str = ""

    def dump(self) -> bytes:
        return encode({"outcome": self.outcome, "text": self.text})

    @classmethod
    def load(cls, data: bytes) -> Resolution:
        """Raises ValueError, KeyError or TypeError where `data` is not a resolution."""
        raw = decode(data)
        return cls(raw["outcome"], raw["text"])
