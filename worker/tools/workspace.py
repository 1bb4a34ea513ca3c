"""File access that cannot leave the workspace.

A path is resolved first, which follows the links, and must then lie in the workspace. What is opened is that
resolved path, one component at a time from the workspace's own descriptor and without following links: a link
that is swapped in between check and use is refused by the kernel, not raced. Hard links cannot be told apart
from files and are trusted. POSIX only, as the worker is.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from worker.errors import ToolFailure

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO would otherwise wait for a writer for ever.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def locate(workspace: Path, path: str) -> tuple[str, ...]:
    """The components of `path` below the workspace, links resolved; empty for the workspace itself.

    Raises ToolFailure for an absolute path, one with `..`, a NUL byte, and one that leads outside.
    """
    if "\0" in path:
        raise ToolFailure("A path cannot contain a NUL character.")
    pure = Path(path)
    if pure.is_absolute() or ".." in pure.parts:
        raise ToolFailure(f"{path}: paths are relative to the workspace and cannot contain `..`.")
    root = workspace.resolve()
    with said_plainly(path):
        try:
            found = (root / pure).resolve()
        except RuntimeError as error:  # Python 3.11 and 3.12: a loop of links
            raise ToolFailure(f"{path}: a loop of symbolic links.") from error
    if not found.is_relative_to(root):
        raise ToolFailure(f"{path}: leads outside the workspace.")
    return found.relative_to(root).parts


@contextmanager
def said_plainly(path: str) -> Iterator[None]:
    """Turn an OSError into a ToolFailure with the path as the model wrote it: real paths are the host's business."""
    try:
        yield
    except OSError as error:
        raise ToolFailure(f"{path}: {error.strerror or error}.") from error


@contextmanager
def directory(workspace: Path, parts: tuple[str, ...], *, create: bool = False) -> Iterator[int]:
    """The descriptor of the directory at `parts`, as `locate` gave them; with `create`, missing ones are made
    and survive a power cut. Raises OSError."""
    if create:
        workspace.mkdir(parents=True, exist_ok=True)
    here = os.open(workspace.resolve(), _DIRECTORY)
    try:
        for part in parts:
            below = _enter(here, part, create)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


@contextmanager
def opened(workspace: Path, path: str) -> Iterator[BinaryIO]:
    """The regular file at `path`, open for reading. Raises ToolFailure."""
    parts = locate(workspace, path)
    if not parts:
        raise ToolFailure(f"{path}: is a directory.")
    with said_plainly(path), directory(workspace, parts[:-1]) as parent:
        descriptor = open_regular(parts[-1], parent)
    if descriptor is None:
        raise ToolFailure(f"{path}: is not a regular file.")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def open_regular(name: str, parent: int) -> int | None:
    """A reading descriptor of file `name` in directory `parent`; None if it is no regular file. Raises OSError."""
    descriptor = os.open(name, _FILE, dir_fd=parent)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def _enter(parent: int, name: str, create: bool) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
    try:
        os.mkdir(name, dir_fd=parent)
        os.fsync(parent)
    except FileExistsError:  # another tool call was quicker
        pass
    return os.open(name, _DIRECTORY, dir_fd=parent)
