"""A measured number beside its floor, and the bar it is held to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Bar:
    """`of` ratio: ours divided by the floor; ours: the number itself."""

    of: Literal["ratio", "ours"]
    most: float | None = None
    least: float | None = None

    def holds(self, value: float) -> bool:
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    def __str__(self) -> str:
        sign, bound = ("≤", self.most) if self.most is not None else ("≥", self.least)
        return f"{sign} {bound:g}{'x' if self.of == 'ratio' else ''}"


@dataclass(frozen=True)
class Row:
    """One line of the table. `ours` None: not measured, and `note` says why."""

    name: str
    ours: float | None
    floor: float | None
    unit: str
    bar: Bar | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.ours / self.floor if self.ours is not None and self.floor else None

    @property
    def ok(self) -> bool | None:
        """None where there is no bar or nothing was measured."""
        value = self.ratio if self.bar and self.bar.of == "ratio" else self.ours
        return None if self.bar is None or value is None else self.bar.holds(value)

    def document(self) -> dict[str, Any]:
        found = {**asdict(self), "bar": None if self.bar is None else str(self.bar)}
        return found | {"ratio": self.ratio, "ok": self.ok}


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def skipped(name: str, why: str) -> Row:
    return Row(name, None, None, "", note=f"skipped: {why}")
