"""Commands run in the test's own process: a process for each would take twenty times as long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enqueue.cli import cli as enqueue
from enqueue.command import run_command
from ops.cli import cli as baton


class Here:
    """Commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def run(self, program: str, *argv: str, code: int = 0) -> str:
        """What it printed: to stdout, or to stderr if it is to be refused."""
        self.capsys.readouterr()
        command = {"baton": baton, "enqueue-task": enqueue}[program]
        got = run_command(command, program, list(argv))
        printed = self.capsys.readouterr()
        assert got == code, printed.err
        return printed.err if code else printed.out or printed.err

    def json(self, *argv: str) -> Any:
        return json.loads(self.run(*argv, "--json"))
