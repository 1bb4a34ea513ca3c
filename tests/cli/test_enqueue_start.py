"""`enqueue-task` starts fast because of what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from tests.support.commands import environment

HEAVY = {
    "anthropic",
    "httpx2",
    "httpx",
    "jinja2",
    "pydantic_settings",
    "rich",
    "supervisor",
    "tenacity",
    "flask",
    "ops",
}

PROBE = """
import json, sys
{code}
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""


def modules_after(code: str, url: str = "redis://127.0.0.1:1") -> set[str]:
    argv = [sys.executable, "-c", PROBE.format(code=code)]
    done = subprocess.run(argv, capture_output=True, env=environment(url), check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.server
def test_enqueuing_imports_neither_anthropic_nor_anything_else_that_is_slow(
    redis_client: redis.Redis, redis_url: str
) -> None:
    code = "from enqueue.cli import cli, run_command; assert run_command(cli, 'enqueue-task', ['x']) == 0"
    modules = modules_after(code, redis_url)

    assert modules & HEAVY == set()
    assert {"redis", "rq", "pydantic"} <= modules, "a probe that saw nothing would prove nothing"
    assert redis_client.llen("rq:queue:agents") == 1


def test_importing_the_package_costs_nothing_until_a_name_is_used() -> None:
    assert modules_after("import enqueue") & {"redis", "rq", "pydantic", "click"} == set()
    assert "redis" in modules_after("from enqueue import enqueue_task")


@pytest.mark.parametrize("module", ["enqueue.cli", "ops.cli"])
def test_help_needs_neither_redis_nor_rq(module: str) -> None:
    code = f"from {module} import cli, run_command; run_command(cli, 'x', ['--help'])"
    assert modules_after(code) & {"redis", "rq", "pydantic", "rich", "anthropic", "supervisor"} == set()


@pytest.mark.parametrize("module", ["enqueue", "enqueue.cli"])
def test_a_name_that_does_not_exist_is_an_ordinary_error(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"from {module} import nonsense"], capture_output=True, cwd=Path.cwd())
    assert b"ImportError: cannot import name 'nonsense'" in done.stderr
