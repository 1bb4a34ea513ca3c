"""`baton env`: after `eval "$(baton env)"` a plain `rq worker` is the right one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from rq.cli.helpers import CliConfig
from rq.worker import Worker

from ops.cli import cli
from worker.fleet import ForkWorker

ODD_URL = "redis://:it's%20$HOME@127.0.0.1:6379/3"
NAMES = ("RQ_REDIS_URL", "RQ_WORKER_CLASS", "BATON_REDIS_URL", "BATON_QUEUE", "BATON_KEY_PREFIX")


def printed(*options: str) -> str:
    result = CliRunner().invoke(cli, ["env", *options], env={"BATON_REDIS_URL": ODD_URL, "BATON_QUEUE": "night"})
    assert result.exit_code == 0, result.output
    return result.output


def evaluated(lines: str, tmp_path: Path) -> dict[str, str]:
    """What a shell that has evaluated the lines gives to its children."""
    script = f"{lines}\nfor name in {' '.join(NAMES)}; do printenv $name; done"
    shell = subprocess.run(
        ["sh", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, cwd=tmp_path
    )
    assert not shell.stderr
    return dict(zip(NAMES, shell.stdout.splitlines(), strict=True))


def test_a_shell_that_evaluates_it_has_every_value_to_the_letter(tmp_path: Path) -> None:
    found = evaluated(printed(), tmp_path)
    assert found["RQ_REDIS_URL"] == found["BATON_REDIS_URL"] == ODD_URL
    assert (found["BATON_QUEUE"], found["BATON_KEY_PREFIX"]) == ("night", "baton")


@pytest.mark.parametrize(("name", "expected"), [("fork", ForkWorker), ("stock", Worker)])
def test_rq_makes_the_worker_that_was_asked_for(name: str, expected: type) -> None:
    named = json.loads(printed("--json", "--worker-class", name))["RQ_WORKER_CLASS"]
    assert CliConfig(worker_class=named).worker_class is expected


def test_an_unknown_class_is_wrong_use() -> None:
    result = CliRunner().invoke(cli, ["env", "--worker-class", "quick"])
    assert result.exit_code == 2
