"""What a drill may touch: its own processes only. Sabotage works nowhere else, and nothing outlives the drill."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from ops.drill.arena import fresh
from ops.drill.nursery import NONCE_KEY
from ops.processes import lock_is_free
from ops.valkey import Server
from tests.support.drill_runs import run_drill
from tests.support.processes import Proc
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.fleet, pytest.mark.crash]

TRY = """
import os, sys
from ops.drill import nursery, sabotage
from worker.settings import load_settings
from worker.state.store import Store
for secret in sys.argv[1:]:
    os.environ[nursery.NONCE_VARIABLE] = secret
    before = Store.mark_started
    try:
        sabotage.take_away("marker", load_settings())
    except sabotage.SabotageRefused as refused:
        print("refused", Store.mark_started is before, refused)
    else:
        print("taken away", Store.mark_started is before)
"""


def try_sabotage(url: str, *secrets: str) -> list[str]:
    """In a process of its own, so that nothing is patched here."""
    argv = [sys.executable, "-c", textwrap.dedent(TRY), *secrets]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env={"BATON_REDIS_URL": url})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_sabotage_is_refused_where_redis_does_not_carry_the_drills_secret(
    redis_client: redis.Redis, server: Server
) -> None:
    """A production worker that came to import the module by some accident must keep all its protections."""
    redis_client.set(NONCE_KEY, "secret")
    none, wrong, right = try_sabotage(server.url, "", "guess", "secret")
    assert none.startswith("refused True")
    assert wrong.startswith("refused True")
    assert right == "taken away False", "the control: with the secret it is a sabotage"
    redis_client.delete(NONCE_KEY)
    (foreign,) = try_sabotage(server.url, "secret")
    assert foreign.startswith("refused True This is no process of a drill")


def test_workers_that_cannot_start_are_the_environments_fault_and_not_a_verdict(tmp_path: Path) -> None:
    (tmp_path / "unlucky.py").write_text(
        "import os\nfrom worker.tools import tool\n"
        "if 'DRILL_EFFECTS' in os.environ:\n    raise RuntimeError('no luck in a worker')\n"
        "@tool\ndef ring(bell: str) -> str:\n    '''Ring a bell.'''\n    return bell\n"
    )
    script = tmp_path / "own.json"
    script.write_text(json.dumps({"turns": [{"text": "done"}]}))
    done = run_drill(tmp_path / "drill", "--tools", "unlucky", "--script", script)
    assert done.code == 3, done
    assert "no luck in a worker" in done.err
    assert lock_is_free(tmp_path / "drill" / "valkey" / "server.lock"), "the server has ended too"


def of_drill(home: Path) -> list[int]:
    """Processes that carry the drill's environment."""
    mark = f"DRILL_EFFECTS={home}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def test_a_drill_that_is_killed_itself_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither workers nor its server; and the directory is good for another."""
    home = tmp_path / "drill"
    program = Path(sys.executable).with_name("baton")
    argv = [program, "drill", "--dir", home, "--no-control", "--seconds", "60", "--kill", "horse"]
    with Proc(argv, log=tmp_path / "drill.log", cwd=tmp_path) as drill:
        drill.expect("SIGKILL")
        assert len(of_drill(home)) > 3, "workers, sweepers, and what they are forked from"
        assert not lock_is_free(home / "valkey" / "server.lock")
        drill.kill()
        wait_until(lambda: not of_drill(home), "the end of all that the drill has forked")
        wait_until(lambda: lock_is_free(home / "valkey" / "server.lock"), "the end of its server")
        with fresh(home):
            assert not (home / "valkey").exists()
