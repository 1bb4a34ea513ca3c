"""One fleet per module, and a table of what became of each death at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ops.valkey import Server
from tests.support.fleet import Fleet, running_fleet

LINES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="module")
def fleet(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """No process runs yet but the server and the model."""
    with running_fleet(tmp_path_factory.mktemp("crash"), server.url) as running:
        yield running


@pytest.fixture
def verdicts(pytestconfig: pytest.Config) -> list[str]:
    """Lines appended here are printed when all is over."""
    return pytestconfig.stash.setdefault(LINES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(LINES, []):
        terminalreporter.section("kill -9 at → decided → really ran")
        for line in sorted(lines):
            terminalreporter.write_line(line)
