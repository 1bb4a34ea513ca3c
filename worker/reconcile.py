"""Decide what becomes of a pending call. Pure: acting on it is the agent's.

    ledger          marker    effect                   decision
    hit             –         any                      REUSE: the recorded result, run nothing
    miss            absent    any                      RUN: it never started
    miss            present   read_only                RERUN
    miss            present   idempotent               RERUN, with the same idempotency key
    miss            present   side_effect, `verify`    VERIFY: ask the world; if it cannot tell, as without. "It has
                                                       not happened" counts only if the process that began the call is
                                                       proven dead (one that merely sleeps may yet do it) and
                                                       time enough has passed for what it had sent
    miss            present   side_effect              UNKNOWN, or HOLD if the tool says on_unknown="hold"
    miss            absent    tool not known here      NO_SUCH_TOOL

A hit needs the same turn, name and input digest; with another name or digest it is not a hit but damage. "Absent"
counts only if Redis lost nothing since point A; else a missing marker is taken for present. The effect is
the stricter one of the marker's and today's: a deploy cannot make a call harmless that was begun as a side effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from worker.errors import CheckpointDamaged
from worker.state.codec import digest
from worker.state.ledger import Call, Entry, Marker
from worker.tools import Effect


class Decision(StrEnum):
    REUSE = "reuse"
    RUN = "run"
    RERUN = "rerun"
    VERIFY = "verify"
    UNKNOWN = "unknown"
    HOLD = "hold"
    NO_SUCH_TOOL = "no such tool"


@dataclass(frozen=True)
class Nature:
    """What a decision needs to know of a tool."""

    effect: Effect
    can_verify: bool = False
    on_unknown: Literal["report", "hold"] = "report"


def decide(
    call: Call, *, entry: Entry | None, marker: Marker | None, markers_trusted: bool, nature: Nature | None
) -> Decision:
    """`nature` None: no tool of that name here. Raises CheckpointDamaged if the ledger tells of another call."""
    if entry is not None:
        if entry.name != call.name or entry.input_digest != digest(call.input):
            raise CheckpointDamaged(
                f"the ledger entry of call {call.id} in turn {call.turn} is of another call ({entry.name})"
            )
        return Decision.REUSE
    never_started = marker is None and markers_trusted
    if nature is None:
        return Decision.NO_SUCH_TOOL if never_started else Decision.UNKNOWN
    if never_started:
        return Decision.RUN
    began_as_side_effect = marker is not None and marker.effect == Effect.SIDE_EFFECT
    if nature.effect is not Effect.SIDE_EFFECT and not began_as_side_effect:
        return Decision.RERUN
    return Decision.VERIFY if nature.can_verify else when_unknown(nature)


def after_asking(outcome: str, marker: Marker | None, nature: Nature) -> Decision:
    """What follows from verify's answer. VERIFY: it happened, record what verify told; RUN: it did not and cannot any
    more; else as when nobody can tell."""
    if outcome == "happened":
        return Decision.VERIFY
    dead = marker is not None and marker.holder_gone
    return Decision.RUN if outcome == "not_happened" and dead else when_unknown(nature)


def when_unknown(nature: Nature | None) -> Decision:
    """The last line of the table: nobody can tell whether the call happened."""
    return Decision.HOLD if nature is not None and nature.on_unknown == "hold" else Decision.UNKNOWN
