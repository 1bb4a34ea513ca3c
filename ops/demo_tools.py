"""The tools of `baton demo`, and an example of how tools are written: three that look, one that does.

Each real run of `write_report` leaves a line in effects.log, outside Redis: that is how the demo knows how often
it ran.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from worker.tools import ToolContext, ToolFailure, tool

NOTES, REPORT, EFFECTS = "notes.txt", "report.txt", "effects.log"


@tool(effect="read_only")
def read_notes(context: ToolContext) -> str:
    """Read the notes that the report is to be made of."""
    return (context.workspace / NOTES).read_text(encoding="utf-8", errors="replace")


@tool(effect="read_only")
def count_words(text: str) -> dict[str, Any]:
    """Count lines and words of a text, and add up the amounts of money in it.

    Args:
        text: The text to count in.
    """
    amounts = [float(found.replace(",", "")) for found in re.findall(r"\$\s?(\d[\d,]*(?:\.\d+)?)", text)]
    lines = [line for line in text.splitlines() if line.strip()]
    return {"lines": len(lines), "words": len(text.split()), "amounts": len(amounts), "total": round(sum(amounts), 2)}


@tool  # unmarked: a side effect. It appends, so a second run would show.
def write_report(title: str, body: str, context: ToolContext) -> str:
    """Append a report to the report file.

    Args:
        title: Its first line.
        body: The rest.
    """
    _append(context.workspace / REPORT, f"{title}\n{'=' * len(title)}\n{body}\n")
    _append(context.workspace / EFFECTS, f"write_report {context.task_id} attempt {context.attempt}\n")
    return f"written: {len(body.split())} words"


@tool(effect="read_only")
def read_report(context: ToolContext) -> str:
    """Read the report file."""
    try:
        return (context.workspace / REPORT).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ToolFailure("there is no report yet") from None


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
