"""What a check of a guarantee gives."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Broken:
    """One example of what broke. `call`: its id, if it is about one."""

    task: str
    what: str
    call: str = ""


@dataclass
class Check:
    """`checked` counts what was looked at, in `unit`."""

    unit: str
    checked: int = 0
    broken: list[Broken] = field(default_factory=list)

    def look(self, task: str, holds: bool, what: str, call: str = "") -> None:
        self.checked += 1
        if not holds:
            self.broken.append(Broken(task, what, call))
