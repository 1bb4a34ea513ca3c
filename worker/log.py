"""Log lines are an event name and fields, never prose with values inside, and never task text."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any


def show_events() -> None:
    """Let Baton's events reach stderr where nobody has set up logging: RQ sets up its own loggers only.

    BATON_LOG_LEVEL (default INFO) says from which level on."""
    if logging.getLogger().handlers or logging.getLogger("worker").handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("worker")
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("BATON_LOG_LEVEL", "").upper() or "INFO")


def event(logger: logging.Logger, name: str, /, *, level: int = logging.INFO, **fields: Any) -> None:
    """One line: `name key=value …`; values with blanks are quoted."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", " ".join([name, *(f"{key}={_shown(value)}" for key, value in fields.items())]))


def _shown(value: Any) -> str:
    text = str(value)
    return repr(text) if not text or any(c.isspace() or c in "\"'=" for c in text) else text
