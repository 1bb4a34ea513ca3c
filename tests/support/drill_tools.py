"""Tools as a user might bring them to a drill: one that lies about what it is, and one that waits for a person."""

from __future__ import annotations

import time

from worker.tools import ToolContext, tool


@tool(effect="idempotent")
def shelve(book: str, context: ToolContext) -> str:
    """Put a book on its shelf."""
    time.sleep(0.05)
    return f"{book} is on its shelf"


@tool(on_unknown="hold")
def post(letter: str) -> str:
    """Post a letter."""
    time.sleep(0.05)
    return f"{letter} is posted"


@tool  # unmarked: a side effect
def ring(bell: str) -> str:
    """Ring a bell."""
    time.sleep(0.05)
    return f"{bell} rang"
