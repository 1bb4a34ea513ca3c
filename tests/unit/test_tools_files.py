"""read_file, list_dir, write_file and grep stay in the workspace; the first three say what they did."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tools_kit import SECRET, answer, context, make_workspace, refusal
from worker.errors import ToolFailure
from worker.tools.builtin import grep, list_dir, read_file, write_file
from worker.tools.workspace import directory, locate


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return make_workspace(tmp_path)


ESCAPES = [
    "/etc/passwd",
    "../outside/secret.txt",
    "notes/../../outside/secret.txt",
    "out_file",
    "out_dir/secret.txt",
    "dangling_out",
    "loop",
    "a\0b",
    "fifo",
    "x" * 300,
    "notes/a.txt/more",
]


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_leads_out_of_the_workspace(workspace: Path, path: str) -> None:
    outside = workspace.parent / "outside"
    for text in (
        refusal(read_file, context(workspace), path=path),
        refusal(write_file, context(workspace), path=path, content="owned"),
        refusal(list_dir, context(workspace), path=path),
        refusal(grep, context(workspace), path=path, text="secret"),
    ):
        assert SECRET not in text
        assert str(workspace) not in text, "where the workspace is on the host is not the model's business"
    assert [p.name for p in outside.iterdir()] == ["secret.txt"]
    assert (outside / "secret.txt").read_text() == SECRET


def test_a_link_that_stays_inside_is_followed(workspace: Path) -> None:
    """Control for the refusals above."""
    assert answer(read_file, context(workspace), path="in_link") == "one\ntwo\nthree"
    answer(write_file, context(workspace), path="in_link", content="new")
    assert (workspace / "notes" / "a.txt").read_text() == "new"
    assert (workspace / "in_link").is_symlink()


def test_a_directory_swapped_for_a_link_between_check_and_use_is_refused(workspace: Path) -> None:
    """The classic race: locate() says fine, then the component changes."""
    parts = locate(workspace, "notes/secret.txt")
    (workspace / "notes").rename(workspace / "moved")
    (workspace / "notes").symlink_to(workspace.parent / "outside")
    with pytest.raises(OSError, match=r"Not a directory|symbolic"), directory(workspace, parts[:-1]):
        pass


names = st.sampled_from(
    ["..", ".", "", "notes", "out_dir", "out_file", "loop", "in_link", "secret.txt", "~", "\0", "é"]
)


@given(st.lists(names, max_size=6), st.booleans())
def test_whatever_locate_accepts_lies_in_the_workspace(parts: list[str], absolute: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        inside = Path(name) / "inside"
        (inside / "notes").mkdir(parents=True)
        (inside / "out_dir").symlink_to("..")
        (inside / "out_file").symlink_to("/etc/passwd")
        (inside / "loop").symlink_to("loop")
        (inside / "in_link").symlink_to("notes")
        path = ("/" if absolute else "") + "/".join(parts)
        try:
            found = locate(inside, path)
        except ToolFailure:
            return
        real = Path(os.path.realpath(inside.joinpath(*found)))
        assert real.is_relative_to(os.path.realpath(inside))
        assert real == Path(os.path.realpath(inside / path))


def test_reading_goes_on_page_by_page(workspace: Path) -> None:
    (workspace / "long.txt").write_text("".join(f"line {n}\n" for n in range(1, 101)))
    page = answer(read_file, context(workspace), path="long.txt", first_line=3, lines_max=2)
    assert page == "line 3\nline 4\n[lines 3 to 4 of 100; continue with first_line=5]"
    assert answer(read_file, context(workspace), path="long.txt", first_line=99) == "line 99\nline 100"
    assert "only 100 lines" in refusal(read_file, context(workspace), path="long.txt", first_line=101)


def test_every_line_of_a_file_longer_than_a_result_can_be_reached(workspace: Path) -> None:
    lines = [f"line {n} " + "é" * (n % 40) for n in range(500)]
    (workspace / "long.txt").write_text("\n".join(lines))
    seen: list[str] = []
    while len(seen) < len(lines):
        text = answer(read_file, context(workspace, result_max_bytes=400), path="long.txt", first_line=len(seen) + 1)
        assert len(text.encode()) <= 400
        seen += [line for line in text.split("\n") if not line.startswith("[lines")]
    assert seen == lines


def test_a_line_longer_than_a_result_shows_its_start(workspace: Path) -> None:
    (workspace / "wide.txt").write_text("x" * 1_000 + "\nnext")
    text = answer(read_file, context(workspace, result_max_bytes=300), path="wide.txt")
    assert text.startswith("xxx")
    assert text.endswith("[lines 1 to 1 of 2; continue with first_line=2]")


def test_what_is_no_text_is_described_and_not_dumped(workspace: Path) -> None:
    (workspace / "b.bin").write_bytes(b"\xff\x00" * 50)
    assert refusal(read_file, context(workspace), path="b.bin") == "b.bin: is a binary file of 100 bytes, not text."
    with (workspace / "huge.txt").open("wb") as file:
        file.truncate(20_000_001)
    assert "larger than" in refusal(read_file, context(workspace), path="huge.txt")
    (workspace / "empty").touch()
    assert answer(read_file, context(workspace), path="empty") == "(the file is empty)"
    assert refusal(read_file, context(workspace), path="nope") == "nope: No such file or directory."
    assert "is not a regular file" in refusal(read_file, context(workspace), path="notes")


def test_a_socket_and_a_fifo_do_not_block(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)  # a socket's path has room for 107 bytes only
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        refusal(read_file, context(workspace), path="s")
        refusal(read_file, context(workspace), path="fifo")
        assert "not a regular file" in refusal(write_file, context(workspace), path="fifo", content="x")


def test_a_directory_is_listed_with_kinds_and_sizes(workspace: Path) -> None:
    (workspace / "notes" / "sub").mkdir()
    (workspace / "notes" / "link").symlink_to("a.txt")
    assert answer(list_dir, context(workspace), path="notes").split("\n") == [
        "a.txt (14 bytes)",
        "b.md (9 bytes)",
        "link@",
        "sub/",
    ]
    assert "fifo?" in answer(list_dir, context(workspace))
    assert answer(list_dir, context(workspace), path="notes/sub") == "(empty directory)"
    assert "nothing has been written" in answer(list_dir, context(workspace / "later"))


def test_a_long_directory_says_how_much_is_missing(workspace: Path) -> None:
    for n in range(1_003):
        (workspace / "notes" / f"n{n:04}").touch()
    lines = answer(list_dir, context(workspace, result_max_bytes=100_000), path="notes").split("\n")
    assert len(lines) == 1_001
    assert lines[-1] == "… and 5 more entries"


def test_writing_twice_leaves_the_world_and_the_answer_as_writing_once(tmp_path: Path) -> None:
    """It is idempotent: after a crash it runs again, and nobody can tell."""
    here = context(tmp_path / "new")
    first = answer(write_file, here, path="deep/er/a.txt", content="héllo\r\n")
    again = answer(write_file, here, path="deep/er/a.txt", content="héllo\r\n")
    assert first == again == "deep/er/a.txt now holds these 8 bytes."
    assert (tmp_path / "new/deep/er/a.txt").read_bytes() == "héllo\r\n".encode()
    assert [p.name for p in (tmp_path / "new/deep/er").iterdir()] == ["a.txt"]


def test_a_rerun_removes_what_its_killed_run_left_and_only_that(workspace: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    leftovers: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", kill)
        patch.setattr("worker.tools.builtin.files._forget", lambda *_: None)  # SIGKILL runs no cleanup
        with pytest.raises(Killed):
            write_file.run({"path": "notes/a.txt", "content": "new"}, context(workspace))
    leftovers = [p.name for p in (workspace / "notes").iterdir() if p.name.startswith(".baton-")]
    assert len(leftovers) == 1
    assert (workspace / "notes" / "a.txt").read_text() == "one\ntwo\nthree\n", "the old content, whole"

    answer(write_file, context(workspace, idempotency_key="another"), path="notes/c.txt", content="x")
    assert (workspace / "notes" / leftovers[0]).exists(), "control: another call's file is not its to remove"
    answer(write_file, context(workspace, epoch=2), path="notes/a.txt", content="new")
    assert sorted(p.name for p in (workspace / "notes").iterdir()) == ["a.txt", "b.md", "c.txt"]


def test_a_paused_run_that_was_overtaken_does_not_overwrite(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder stopped before its rename wakes up after the new holder has finished, and more has been written."""
    replace = os.replace

    def paused(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(os, "replace", replace)
        answer(write_file, context(workspace, epoch=2), path="notes/a.txt", content="same")
        answer(write_file, context(workspace, epoch=2, idempotency_key="later"), path="notes/a.txt", content="later")
        replace(*args, **kwargs)

    monkeypatch.setattr(os, "replace", paused)
    refusal(write_file, context(workspace, epoch=1), path="notes/a.txt", content="same")
    assert (workspace / "notes" / "a.txt").read_text() == "later"


def test_a_failed_write_leaves_the_old_content_and_no_litter(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert refusal(write_file, context(workspace), path="notes/a.txt", content="new").endswith("device.")
    assert sorted(p.name for p in (workspace / "notes").iterdir()) == ["a.txt", "b.md"]
    assert (workspace / "notes" / "a.txt").read_text() == "one\ntwo\nthree\n"


def test_a_file_keeps_its_mode(workspace: Path) -> None:
    script = workspace / "run.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o750)
    answer(write_file, context(workspace), path="run.sh", content="#!/bin/sh\ntrue\n")
    assert stat.S_IMODE(script.stat().st_mode) == 0o750


@pytest.mark.parametrize("path", [".", "notes", "notes/"])
def test_a_directory_is_not_written_over(workspace: Path, path: str) -> None:
    refusal(write_file, context(workspace), path=path, content="x")
    assert (workspace / "notes").is_dir()


def test_a_file_too_large_is_refused_before_anything_is_written(workspace: Path) -> None:
    assert "too many" in refusal(write_file, context(workspace), path="big", content="é" * 5_000_001)
    assert not (workspace / "big").exists()
