"""read_file, list_dir, write_file: files in the workspace. The docstrings of the tools are read by the model."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from itertools import islice
from typing import Annotated

from pydantic import Field

from worker.errors import ToolFailure
from worker.tools.base import tool
from worker.tools.context import ToolContext
from worker.tools.output import cut
from worker.tools.workspace import directory, locate, opened, said_plainly

READ_MAX_BYTES = 20_000_000
WRITE_MAX_BYTES = 10_000_000
ENTRIES_MAX = 1_000
_NOTE_BYTES = 120
"""Room kept free in a result for the note that says how to go on."""


@tool(effect="read_only")
def read_file(
    path: str,
    context: ToolContext,
    first_line: Annotated[int, Field(ge=1)] = 1,
    lines_max: Annotated[int, Field(ge=1, le=10_000)] = 2_000,
) -> str:
    """Read a text file of the workspace.

    Returns the text as it is, without line numbers. If the file has more lines than are returned, a last line
    in square brackets says which were shown and with which first_line to continue. Binary files, files over
    20 MB and anything that is not a regular file are refused.

    Args:
        path: Path of the file, relative to the workspace, such as "notes/today.md".
        first_line: Number of the first line to return; the first line of the file is 1.
        lines_max: How many lines to return at most.
    """
    text = _read_text(path, context)
    lines = text.split("\n")
    if text.endswith("\n"):
        lines.pop()  # what follows the last line break is no line
    if not text:
        return "(the file is empty)"
    if first_line > len(lines):
        raise ToolFailure(f"{path}: has only {len(lines)} lines.")
    return _page(lines, first_line, lines_max, context.result_max_bytes)


@tool(effect="read_only")
def list_dir(context: ToolContext, path: str = ".") -> str:
    """List one directory of the workspace, sorted by name, one entry per line; it does not descend.

    A directory ends in "/", a symbolic link in "@", anything else that is not a regular file in "?"; a file is
    followed by its size in bytes. At most 1000 entries are shown.

    Args:
        path: Path of the directory, relative to the workspace; "." is the workspace itself.
    """
    parts = locate(context.workspace, path)
    if not parts and not context.workspace.exists():
        return "(empty: nothing has been written to the workspace yet)"
    with said_plainly(path), directory(context.workspace, parts) as here, os.scandir(here) as entries:
        lines = [_entry(entry) for entry in sorted(entries, key=lambda entry: entry.name)]
    more = [f"… and {len(lines) - ENTRIES_MAX} more entries"] if len(lines) > ENTRIES_MAX else []
    return "\n".join(lines[:ENTRIES_MAX] + more) or "(empty directory)"


@tool(effect="idempotent")
def write_file(path: str, content: str, context: ToolContext) -> str:
    """Write a text file in the workspace, replacing it if it exists; missing directories are made.

    The file changes in one step: it has either its old content or all of the new one. There is no way to
    append: to change a part, read the file and write all of it. At most 10 MB.

    Args:
        path: Path of the file, relative to the workspace, such as "notes/today.md".
        content: The whole new text of the file, written as UTF-8 exactly as given.
    """
    data = content.encode()
    if len(data) > WRITE_MAX_BYTES:
        raise ToolFailure(f"{path}: {len(data)} bytes are too many; at most {WRITE_MAX_BYTES} are allowed.")
    parts = locate(context.workspace, path)
    if not parts or path.endswith("/"):
        raise ToolFailure(f"{path}: is a directory.")
    with said_plainly(path), directory(context.workspace, parts[:-1], create=True) as parent:
        _replace(parent, parts[-1], data, path, context)
    # The same words whether the file is new, old or already written by a run that was cut off.
    return f"{path} now holds these {len(data)} bytes."


def _read_text(path: str, context: ToolContext) -> str:
    with opened(context.workspace, path) as file:
        data = file.read(READ_MAX_BYTES + 1)
    if len(data) > READ_MAX_BYTES:
        raise ToolFailure(f"{path}: is larger than {READ_MAX_BYTES} bytes; use grep to find what you need.")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ToolFailure(f"{path}: is a binary file of {len(data)} bytes, not text.")
    return text


def _page(lines: list[str], first_line: int, lines_max: int, max_bytes: int) -> str:
    """Whole lines from `first_line` on that fit, and a note if some are left; of a line too long for a whole
    result, its start."""
    room = max(max_bytes - _NOTE_BYTES, 64)
    shown: list[str] = []
    for line in islice(lines, first_line - 1, first_line - 1 + lines_max):
        room -= len(line.encode()) + 1
        if room < 0 and shown:
            break
        shown.append(line if room >= 0 else cut(line, max(max_bytes - _NOTE_BYTES, 64)))
    last = first_line + len(shown) - 1
    if last == len(lines):
        return "\n".join(shown)
    note = f"[lines {first_line} to {last} of {len(lines)}; continue with first_line={last + 1}]"
    return "\n".join([*shown, note])


def _entry(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return f"{entry.name}@"
    if entry.is_dir(follow_symlinks=False):
        return f"{entry.name}/"
    if not entry.is_file(follow_symlinks=False):
        return f"{entry.name}?"
    try:
        return f"{entry.name} ({entry.stat(follow_symlinks=False).st_size} bytes)"
    except FileNotFoundError:  # removed since it was listed
        return f"{entry.name} (gone)"


def _replace(parent: int, name: str, data: bytes, path: str, context: ToolContext) -> None:
    mode = _mode_of(parent, name, path)
    prefix = f".baton-{hashlib.sha256(context.idempotency_key.encode()).hexdigest()[:16]}-"
    for leftover in os.listdir(parent):
        # A run of this same call that was killed left it. If that run is only paused, it now fails at its
        # os.replace instead of overwriting what later calls wrote.
        if leftover.startswith(prefix):
            os.unlink(leftover, dir_fd=parent)
    temporary = f"{prefix}{context.epoch}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666, dir_fd=parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if context.cancelled:  # a process that was asleep past its lease must not undo what its successor wrote
            raise ToolFailure(f"{path}: not written, the task is being stopped.")
        os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        _forget(temporary, parent)
        raise
    os.fsync(parent)  # the name, too, must survive a power cut before the ledger says it is written


def _mode_of(parent: int, name: str, path: str) -> int | None:
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ToolFailure(f"{path}: exists and is not a regular file.")
    return stat.S_IMODE(found.st_mode)


def _forget(name: str, parent: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
