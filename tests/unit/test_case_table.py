"""The table of real cases in tests/README.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROWS = re.findall(r"^\| ([A-J]\d\d) \| (.*) \|$", (TESTS / "README.md").read_text(), re.MULTILINE)


def test_the_table_is_there_and_names_each_case_once() -> None:
    cases = [case for case, _ in ROWS]
    assert len(cases) > 100
    assert cases == sorted(set(cases))


@pytest.mark.parametrize(("case", "tests"), ROWS, ids=[case for case, _ in ROWS])
def test_a_case_has_a_test_or_a_reason(case: str, tests: str) -> None:
    named = re.findall(r"`(\w+/\w+\.py)`(?: (test_\w+))?", tests)
    assert named or len(tests) > 20, "neither a test nor a reason"
    for file, test in named:
        source = (TESTS / file).read_text()
        assert not test or f"def {test}(" in source
