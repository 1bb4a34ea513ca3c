"""grep finds fixed text, in bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.tools_kit import answer, context, make_workspace, refusal
from worker.tools.builtin import grep
from worker.tools.builtin import search as search_module


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return make_workspace(tmp_path)


def test_grep_finds_lines_in_a_fixed_order(workspace: Path) -> None:
    assert answer(grep, context(workspace), text="o") == "notes/a.txt:1:one\nnotes/a.txt:2:two\nnotes/b.md:1:One more"
    assert answer(grep, context(workspace), text="ONE", ignore_case=True) == "notes/a.txt:1:one\nnotes/b.md:1:One more"
    assert answer(grep, context(workspace), text="o", glob="*.md") == "notes/b.md:1:One more"
    assert answer(grep, context(workspace), text="o", glob="notes/b*") == "notes/b.md:1:One more"
    assert answer(grep, context(workspace), text="o", path="notes/a.txt") == "notes/a.txt:1:one\nnotes/a.txt:2:two"
    assert answer(grep, context(workspace), text="secret") == "(no match)", "links are not followed"


def test_grep_takes_its_text_as_it_is(workspace: Path) -> None:
    """A regular expression could hold the GIL for longer than the lease."""
    (workspace / "re.txt").write_text("aaa\n(a+)+$\n")
    assert answer(grep, context(workspace), text="(a+)+$") == "re.txt:2:(a+)+$"
    refusal(grep, context(workspace), text="a\nb")
    refusal(grep, context(workspace), text="")


def test_grep_skips_binary_and_huge_files(workspace: Path) -> None:
    (workspace / "x.bin").write_bytes(b"one\0")
    (workspace / "y.txt").write_bytes(b"one" + b" " * 20_000_000)
    (workspace / "latin.txt").write_bytes(b"one \xff")
    assert answer(grep, context(workspace), text="one") == "latin.txt:1:one \ufffd\nnotes/a.txt:1:one"


Bound = Callable[[pytest.MonkeyPatch], object]
BOUNDS: list[tuple[Bound, str]] = [
    (lambda patch: patch.setattr(search_module, "FILES_MAX", 1), "too many files"),
    (lambda patch: patch.setattr(search_module, "TOTAL_MAX_BYTES", 1), "too many files"),
    (lambda patch: patch.setattr(search_module, "SEARCH_MAX_S", -1.0), "longer than"),
]


@pytest.mark.parametrize(("bound", "words"), BOUNDS, ids=["files", "bytes", "time"])
def test_a_search_that_meets_a_bound_says_so(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, bound: Bound, words: str
) -> None:
    assert "not everything" not in answer(grep, context(workspace), text="One")
    bound(monkeypatch)
    assert words in answer(grep, context(workspace), text="One").split("\n")[-1]


def test_a_search_that_wants_no_file_still_asks_whether_to_stop(workspace: Path) -> None:
    (workspace / "a/b/c/d/e").mkdir(parents=True)
    asked: list[None] = []

    def should_stop() -> bool:
        asked.append(None)
        return len(asked) > 1

    text = answer(grep, context(workspace, should_stop=should_stop), text="o", glob="*.none")
    assert text == "(no match)\n[not everything was searched: the task is to stop]"
    assert len(asked) == 3, "at the top, one level below, and for the last word"


def test_a_search_stops_at_enough_matches_or_when_the_task_is_to_stop(workspace: Path) -> None:
    assert answer(grep, context(workspace), text="o", matches_max=1).split("\n") == [
        "notes/a.txt:1:one",
        "[not everything was searched: stopped at 1 matches]",
    ]
    assert "to stop" in answer(grep, context(workspace, should_stop=lambda: True), text="o")
