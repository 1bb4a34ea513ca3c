"""Task ids, made by the client: asking again with the same id can then never make a second task.

26 characters: 48 bits of milliseconds, then 80 random bits, in Crockford's base 32 (as ULIDs, lowercase). They sort
by time of enqueuing, to the millisecond and the client's clock; nothing relies on that but people's eyes.
"""

from __future__ import annotations

import re
import secrets
import time

from worker.errors import InvalidInput

DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
TIME_LENGTH, RANDOM_LENGTH = 10, 16

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def new_id(now_ms: int | None = None) -> str:
    """A fresh id. `now_ms`: milliseconds since 1970, this machine's clock if not given."""
    if now_ms is None:
        now_ms = time.time_ns() // 1_000_000
    return _base32(now_ms, TIME_LENGTH) + _base32(secrets.randbits(5 * RANDOM_LENGTH), RANDOM_LENGTH)


def checked_id(task_id: object) -> str:
    """`task_id` itself, if it can be one (or the beginning of one); raises InvalidInput."""
    if not isinstance(task_id, str) or not _ID.fullmatch(task_id):
        raise InvalidInput(f"{str(task_id)[:80]!a} is no task id: 1 to 64 letters, digits, _ or -")
    return task_id


def _base32(number: int, length: int) -> str:
    return "".join(DIGITS[number >> 5 * place & 31] for place in reversed(range(length)))
