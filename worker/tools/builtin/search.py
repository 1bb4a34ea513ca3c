"""grep: fixed text in the files of the workspace. The tool's docstring is read by the model.

No regular expressions, on purpose: a pattern that backtracks holds the GIL inside one C call (10 s were
measured), the heartbeat falls silent, and the lease is lost. A subprocess to kill would cure that
at the price of a fork in a process that may hold threads and locks; fixed text answers most questions.
"""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from worker.errors import ToolFailure
from worker.tools.base import tool
from worker.tools.context import ToolContext
from worker.tools.output import cut
from worker.tools.workspace import directory, locate, open_regular, opened, said_plainly

FILES_MAX = 10_000
FILE_MAX_BYTES = 20_000_000
TOTAL_MAX_BYTES = 500_000_000
SEARCH_MAX_S = 30.0
LINE_MAX_BYTES = 400


@tool(effect="read_only")
def grep(
    text: Annotated[str, Field(min_length=1, max_length=1_000)],
    context: ToolContext,
    path: str = ".",
    glob: Annotated[str, Field(max_length=200)] = "*",
    ignore_case: bool = False,
    matches_max: Annotated[int, Field(ge=1, le=1_000)] = 200,
) -> str:
    """Find a fixed text in the files of the workspace. The text is not a regular expression.

    Returns one line per match, "path:line number:line", always in the same order; long lines are cut.
    Descends into directories, does not follow symbolic links, and skips binary files and files over 20 MB. If not
    everything was searched or shown, the last line says so in square brackets.

    Args:
        text: The exact text to look for, within one line.
        path: File or directory to search, relative to the workspace; "." searches all of it.
        glob: Search only files whose name matches, such as "*.py"; with a "/" in it, the path below the
            workspace must match, such as "docs/*.md", and "*" matches "/" too.
        ignore_case: Whether upper and lower case count as the same.
        matches_max: How many matches to return at most.
    """
    if "\n" in text or "\r" in text:
        raise ToolFailure("The text to look for must be within one line.")
    search = _Search(text, glob, ignore_case, matches_max, context)
    search.run(path)
    if not search.found:
        return "\n".join(["(no match)", *search.notes])
    return "\n".join(search.found + search.notes)


class _Search:
    """One search: what is looked for, what was found, and what is left of its bounds."""

    def __init__(self, text: str, glob: str, ignore_case: bool, matches_max: int, context: ToolContext) -> None:
        self._needle = text.casefold() if ignore_case else text
        self._glob = glob
        self._ignore_case = ignore_case
        self._matches_max = matches_max
        self._context = context
        self._deadline = time.monotonic() + SEARCH_MAX_S
        self._files_left = FILES_MAX
        self._bytes_left = TOTAL_MAX_BYTES
        self.found: list[str] = []
        self.notes: list[str] = []

    def run(self, path: str) -> None:
        for name, data in self._files(path):
            self._look(name, data)
            if self._exhausted():
                break
        if reason := self._exhausted():
            self.notes.append(f"[not everything was searched: {reason}]")

    def _files(self, path: str) -> Iterator[tuple[str, bytes]]:
        """Path below the workspace and content of each file to search."""
        workspace = self._context.workspace
        parts = locate(workspace, path)
        with said_plainly(path):
            if workspace.resolve().joinpath(*parts).is_file():
                with opened(workspace, path) as file:
                    yield "/".join(parts), file.read(FILE_MAX_BYTES)
                return
            with directory(workspace, parts) as top:
                yield from self._walk(top, parts)

    def _walk(self, top: int, parts: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
        # fwalk goes by descriptors and follows no link, so nothing can be swapped in under its feet.
        for below, directories, names, here in os.fwalk(".", dir_fd=top):
            directories.sort()
            if self._exhausted():  # also when no file is wanted, in a very large tree
                return
            for name in sorted(names):
                inner = () if below == "." else tuple(below.split("/")[1:])
                whole = "/".join((*parts, *inner, name))
                if self._wanted(name, whole) and (data := _content(name, here)) is not None:
                    yield whole, data

    def _wanted(self, name: str, whole: str) -> bool:
        # fnmatch makes a regex too, but one with atomic groups since Python 3.11: no backtracking.
        return fnmatch.fnmatchcase(whole if "/" in self._glob else name, self._glob)

    def _look(self, name: str, data: bytes) -> None:
        self._files_left -= 1
        self._bytes_left -= len(data)
        if b"\0" in data[:8_192]:
            return
        text = data.decode("utf-8", "replace")
        if not self._ignore_case and self._needle not in text:
            return
        for number, line in enumerate(text.split("\n"), 1):
            if self._needle in (line.casefold() if self._ignore_case else line):
                self.found.append(f"{name}:{number}:{cut(line.rstrip(), LINE_MAX_BYTES)}")
                if len(self.found) >= self._matches_max:
                    return

    def _exhausted(self) -> str | None:
        if len(self.found) >= self._matches_max:
            return f"stopped at {self._matches_max} matches"
        if self._files_left <= 0 or self._bytes_left <= 0:
            return "too many files; give a path or a glob"
        if time.monotonic() > self._deadline:
            return f"it took longer than {SEARCH_MAX_S:.0f} s; give a path or a glob"
        return "the task is to stop" if self._context.cancelled else None


def _content(name: str, parent: int) -> bytes | None:
    """None for what is not a readable regular file of a sane size: a search goes on without it."""
    try:
        descriptor = open_regular(name, parent)
    except OSError:
        return None
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > FILE_MAX_BYTES:
            return None
        return file.read(FILE_MAX_BYTES)
