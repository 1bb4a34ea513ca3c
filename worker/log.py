"""Log lines are an event name and fields, never prose with values inside, and never task text."""

from __future__ import annotations

import logging
from typing import Any


def event(logger: logging.Logger, name: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """One line: `name key=value …`; values with blanks are quoted."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", " ".join([name, *(f"{key}={_shown(value)}" for key, value in fields.items())]))


def _shown(value: Any) -> str:
    text = str(value)
    return repr(text) if not text or any(c.isspace() or c in "\"'=" for c in text) else text
