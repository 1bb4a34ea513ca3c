"""Fixtures for a real server, in front of all tests.

`server` is one embedded Valkey for the whole run, emptied before each test that takes `redis_client`; a test that
kills or reconfigures its server makes its own with `new_server`. Without a binary for this machine such tests
are skipped; in CI they fail, because there a skip would be silence.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from ops.processes import client as retryless_client
from ops.valkey import Server, ensure
from ops.valkey_place import binary_path
from tests.support.keys import assert_no_leaks
from tests.support.processes import Proc
from worker.errors import RedisUnavailable


@pytest.fixture(scope="session")
def server_binary() -> Path:
    try:
        return binary_path()
    except RedisUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must have a server: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def _session_dir() -> Iterator[Path]:
    # Not pytest's tmp_path: with long names a unix socket's path would not fit in 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="bt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A temporary directory whose path leaves room for a unix socket."""
    path = Path(tempfile.mkdtemp(prefix="bt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def server(server_binary: Path, _session_dir: Path) -> Iterator[Server]:
    """The shared server: persists every write, as `baton up` does."""
    with ensure(_session_dir / "shared") as running:
        yield running


@pytest.fixture
def new_server(server_binary: Path, short_dir: Path) -> Iterator[Callable[..., Server]]:
    """`new_server(name="a", port=0, extra=("--appendfsync", "no"))`: a server of the test's own.

    Called again with the same name it finds that directory's server, or restarts it on the same data.
    """
    made: list[Server] = []

    def make(name: str = "own", **options: Any) -> Server:
        made.append(ensure(short_dir / name, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def redis_url(server: Server) -> str:
    return server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client without retries on an empty database. Emptied before, not after: leak checks look afterwards."""
    client = retryless_client(redis_url, timeout=5)
    client.flushdb()
    yield client
    client.close()


@pytest.fixture
def key_leak_check() -> Iterator[Callable[..., None]]:
    """`key_leak_check(client, allowed=is_index)`: when the test is over, each key left must end by itself."""
    checks: list[tuple[redis.Redis, Callable[[str], bool]]] = []

    def register(client: redis.Redis, allowed: Callable[[str], bool] = lambda key: False) -> None:
        checks.append((client, allowed))

    yield register
    for client, allowed in checks:
        assert_no_leaks(client, allowed)
        client.close()


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., Proc]]:
    """`start_process(argv, env=…)`: a Proc that is gone, with all its descendants, when the test is over."""
    started: list[Proc] = []

    def start(argv: list[str | Path], *, name: str = "process", **options: Any) -> Proc:
        started.append(Proc(argv, log=tmp_path / f"{name}-{len(started)}.log", **options))
        return started[-1]

    yield start
    for process in reversed(started):
        process.close()
