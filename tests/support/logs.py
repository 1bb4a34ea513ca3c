"""Logs of JSON lines that somebody else may be writing at this moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; one that is still being written is not there yet, and no file is an empty log."""
    if not path.exists():
        return []
    whole, _, _unfinished = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]
