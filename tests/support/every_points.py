"""Which mishap is tried at which message.

Each at each would be thirty thousand runs and more than an hour; `EVERY_POINT=1` does that. Else it is this
choice, always the same. In the plain stories: at a message that changes something one of each kind of mishap, the
variants of a kind in turn; at any other message, where it is all one whether it was sent, one of all that may be. The
other stories send most of their messages in the same way, and renewals are all alike: less is tried with those.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.state.faults import Blow, Fault, Mishap
from tests.support.every_course import Message, Point, Proof
from tests.support.every_stories import STORIES, Story

EVERYTHING = os.environ.get("EVERY_POINT", "") not in ("", "0")
LONG_S = 100.0  # longer than a lease, and than a holder's patience with a full server


def _each(mishaps: Sequence[Mishap], **fields: Sequence[object]) -> tuple[Point, ...]:
    made = [Point(mishap) for mishap in mishaps]
    for name, values in fields.items():
        made = [replace(point, **{name: value}) for value in values for point in made]
    return tuple(made)


KILLED_BEFORE = _each([Blow.KILLED_BEFORE], proof=tuple(Proof))
KILLED_AFTER = _each([Blow.KILLED_AFTER], proof=tuple(Proof))
CUT = _each([Fault.LOST, Fault.UNSENT])
REFUSED = _each([Fault.OOM, Fault.MISCONF, Fault.LOADING, Fault.READONLY])
REFUSED_FOR_GOOD = _each([Blow.NOSCRIPT], proof=tuple(Proof))
SLEPT = _each([Blow.FROZEN_AFTER, Blow.FROZEN_BEFORE], ended=(True, False))
LONG = _each(tuple(Fault), for_s=(LONG_S,), proof=(Proof.GONE, Proof.LAPSED))
KINDS = (KILLED_BEFORE, KILLED_AFTER, CUT, REFUSED, REFUSED_FOR_GOOD, SLEPT, LONG)

# Where nothing is changed.
ASLEEP = _each([Blow.FROZEN_BEFORE], ended=(True, False))
LOOK = (*KILLED_BEFORE, *CUT, Point(Fault.LOADING), *REFUSED_FOR_GOOD, *ASLEEP)
# Where most of it was tried in another story.
SAMPLE = (*CUT, *SLEPT, *REFUSED, *REFUSED_FOR_GOOD[:1], LONG[0], LONG[2])
# What matters most, and what costs most.
ALWAYS = (*KILLED_AFTER, Point(Fault.LOST))
PASSING = (Point(Fault.UNSENT), *REFUSED)
NOW_AND_THEN: tuple[Point | None, ...] = (*LONG, *[None] * 3 * len(LONG))


class Turns:
    """Gives the variants of a kind one after the other, beginning at another one in each story."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.places: Counter[tuple[Point | None, ...]] = Counter()

    def next(self, kind: tuple[Point | None, ...]) -> Point | None:
        self.places[kind] += 1
        return kind[(self.first + self.places[kind] * _stride(kind)) % len(kind)]


def _stride(kind: tuple[Point | None, ...]) -> int:
    """Neighbours are alike, so go on by more than one; each still has its turn."""
    return next(step for step in (3, 5, 7, 11) if len(kind) % step)


def points(story: Story, sent: Sequence[Message]) -> Iterator[Point]:
    """The points to try, given what is sent when nothing goes wrong."""
    turns = Turns(STORIES.index(story))
    for at, message in enumerate(sent, 1):
        chosen = [point for kind in KINDS for point in kind] if EVERYTHING else _chosen(story, at, message, turns)
        for point in chosen:
            if point is not None and point.mishap is not None and point.mishap.concerns(message.commands):
                yield replace(point, at=at)
    if EVERYTHING or story.name in ("a side effect", "mixed calls"):
        yield from _forgotten(sent)


def _chosen(story: Story, at: int, message: Message, turns: Turns) -> Iterator[Point | None]:
    plain = story.plain and message.who != "heartbeat"
    if message.changes:
        kinds = (KILLED_BEFORE, PASSING, REFUSED_FOR_GOOD, SLEPT, NOW_AND_THEN) if plain else (KILLED_AFTER, SAMPLE)
        yield from ALWAYS if plain else ()
        yield from (turns.next(kind) for kind in kinds)
    elif story.plain or (at + turns.first) % 2:
        yield turns.next(LOOK)


def _forgotten(sent: Sequence[Message]) -> Iterator[Point]:
    """A holder finds that the server has forgotten the last thing it had acknowledged."""
    last = 0
    for at, message in enumerate(sent, 1):
        ours = message.who in ("worker", "heartbeat")
        if last and ours and message.commands[0] == "WATCH":
            yield Point(Blow.ROLLED_BACK, at, back_to=last)
        if message.changes:
            last = at if ours else 0  # what others did and take for done is not to be forgotten
