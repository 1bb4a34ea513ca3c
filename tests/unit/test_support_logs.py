"""The kit itself: a line that is being written made a green run red once."""

from __future__ import annotations

from pathlib import Path

from tests.support.logs import json_lines


def test_a_line_that_is_still_being_written_is_not_there_yet(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert json_lines(log) == []
    log.write_text('{"n": 1}\n{"n": 2')
    assert json_lines(log) == [{"n": 1}]
    log.write_text('{"n": 1}\n{"n": 2}\n')
    assert json_lines(log) == [{"n": 1}, {"n": 2}], "control"
