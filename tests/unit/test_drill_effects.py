"""The effect log tells of every real run, before and after, and of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.drill.effects import append_line, fingerprint, read_lines, record
from tests.unit.tools_kit import context
from worker.errors import StopRunning, ToolFailure
from worker.tools import Tool, ToolResult, Verdict, tool


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "effects.jsonl"


def double(number: int) -> int:
    """Double it."""
    if number < 0:
        raise ToolFailure("not below zero")
    if number == 13:
        raise StopRunning
    return 2 * number


def recorded(log: Path) -> Tool:
    return record(tool(verify=lambda number: Verdict.happened(number))(double), log)


def test_a_run_is_told_of_before_and_after_with_what_the_model_is_given(log: Path) -> None:
    result = recorded(log).run({"number": 4}, context())
    began, did = read_lines(log)
    assert result == ToolResult("8")
    assert (began["what"], did["what"]) == ("began", "did")
    assert (did["content"], did["isError"]) == (fingerprint("8"), False)
    assert began["effect"] == "side_effect"
    assert began["key"] == did["key"]


def test_a_run_that_failed_is_told_of_as_one(log: Path) -> None:
    recorded(log).run({"number": -1}, context())
    assert [line.get("isError") for line in read_lines(log)] == [None, True]


def test_a_run_that_was_cut_off_began_and_did_not_end(log: Path) -> None:
    with pytest.raises(StopRunning):
        recorded(log).run({"number": 13}, context())
    assert [line["what"] for line in read_lines(log)] == ["began"]


def test_what_verify_answered_is_told_of(log: Path) -> None:
    verdict = recorded(log).ask({"number": 4}, context())
    (asked,) = read_lines(log)
    assert (asked["what"], asked["outcome"], asked["content"]) == ("asked", "happened", fingerprint(verdict.result))


def test_a_tool_that_is_not_recorded_tells_nothing(log: Path) -> None:
    tool(double).run({"number": 4}, context())
    assert read_lines(log) == []


def test_a_line_that_is_still_being_written_is_not_there_yet(log: Path) -> None:
    append_line(log, '{"what": "began"}')
    with log.open("a") as file:
        file.write('{"what": "di')
    assert read_lines(log) == [{"what": "began"}]
