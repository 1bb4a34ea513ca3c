"""Runs of stories on the test's server, the comparison with the run without a mishap, and how many there were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import redis

from tests.support.every_checks import Outcome, check
from tests.support.every_course import Point
from tests.support.every_fleet import Fleet
from tests.support.every_stories import Story

SHOWN_MAX = 12

tried: Counter[str] = Counter()  # points by mishap, in this process


class Stage:
    """Where stories are run, one after the other, each on an empty database.

    Meanwhile the server does not wait for its disk, which would be most of the time: nobody kills the server here.
    """

    def __init__(self, url: str, observer: redis.Redis) -> None:
        self.url = url
        self.observer = observer

    def __enter__(self) -> Stage:
        self._fsync = self.observer.config_get("appendfsync")["appendfsync"]
        self.observer.config_set("appendfsync", "no")
        return self

    def __exit__(self, *_: object) -> None:
        self.observer.config_set("appendfsync", self._fsync)

    def play(self, story: Story, point: Point | None = None) -> Fleet:
        self.observer.flushdb()
        return Fleet(self.url, self.observer, story, point or Point()).run()

    def clean(self, story: Story) -> Outcome:
        return Outcome.of(self.play(story))

    def problems(self, story: Story, clean: Outcome, points: Iterable[Point]) -> list[str]:
        """Try each point; one line for each after which something does not hold."""
        found = []
        for point in points:
            try:
                check(self.play(story, point), clean)
            except Exception as error:
                message = clean.sent[point.at - 1]
                found.append(f"{story.name}, message {point.at} ({message}), {point}: {type(error).__name__}: {error}")
        return found


def told(problems: list[str]) -> str:
    """The first of them, for a failed test."""
    more = [f"and {len(problems) - SHOWN_MAX} more"] if len(problems) > SHOWN_MAX else []
    return "\n".join(["", *problems[:SHOWN_MAX], *more])


def summary() -> str:
    """What was tried in this process, in one line."""
    kinds = ", ".join(f"{number} {mishap}" for mishap, number in tried.most_common())
    return f"{tried.total()} points of death and trouble tried at Redis messages: {kinds}"
