"""How much is measured: `tiny` only proves that the bench works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Size:
    """One of three."""

    name: Literal["tiny", "quick", "full"] = "full"

    def pick(self, tiny: int, quick: int, full: int) -> int:
        return {"tiny": tiny, "quick": quick, "full": full}[self.name]
