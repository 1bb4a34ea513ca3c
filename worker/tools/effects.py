"""What a tool does to the world; it decides what may happen to a call that was cut off."""

from __future__ import annotations

from enum import StrEnum


class Effect(StrEnum):
    """Declared by the author, never guessed from a name; a tool that declares nothing is a `SIDE_EFFECT`."""

    READ_ONLY = "read_only"
    """Changes nothing: may run again at any time, and side by side with others."""
    IDEMPOTENT = "idempotent"
    """Running it again with the same input and idempotency key leaves the world as running it once."""
    SIDE_EFFECT = "side_effect"
    """Anything else: never run a second time by itself."""
