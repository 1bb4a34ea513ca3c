"""Text of a task, a model or a tool on its way to a terminal. It is hostile until shown otherwise.

A model that repeats an escape sequence from a web page must not move the cursor, set the window title or write
into the clipboard; bidirectional overrides and invisible tags must not make a line read as something else.
"""

from __future__ import annotations

import re

_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS, …: title, clipboard
    r"|\x1b[ -/]*[0-~]"
)
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    """`text` without escape sequences, control, invisible and direction characters; new lines and tabs stay."""
    text = _SEQUENCE.sub("", text.replace("\r\n", "\n").replace("\u2028", "\n").replace("\u2029", "\n"))
    return _CONTROL.sub("", text)


def one_line(text: str, length_max: int = 160) -> str:
    """`plain`, on one line, cut with an ellipsis."""
    # Cut before cleaning too: nobody waits for ten megabytes to be cleaned for the sake of one line.
    line = " ".join(plain(text[: 8 * length_max]).split())
    return line if len(line) <= length_max and len(text) <= 8 * length_max else line[: length_max - 1].rstrip() + "…"


def duration(seconds: float) -> str:
    """`45 s`, `3 min`, `2 h`, `5 d`."""
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
