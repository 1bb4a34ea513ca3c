"""One contract, two servers: each test that takes `store` runs on fakeredis and on the embedded Valkey (F14).

Lease expiry is never proven on fakeredis alone: there a watched key that expires before EXEC does not abort it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fakeredis
import pytest
import redis

from tests.state.invariants import check_invariants
from tests.state.kit import make_store, sweeper_of
from tests.support.every_run import summary, tried
from worker.state.store import Store
from worker.state.transact import connect
from worker.sweeper import Sweeper

BOTH = [pytest.param("fakeredis"), pytest.param("valkey", marks=pytest.mark.server)]


@pytest.fixture(params=BOTH)
def backend(request: pytest.FixtureRequest) -> Iterator[Callable[[], redis.Redis]]:
    """Makes clients of one empty server."""
    made: list[redis.Redis] = []
    fake = fakeredis.FakeServer()
    if request.param == "valkey":
        request.getfixturevalue("redis_client")  # empties the database

    def make() -> redis.Redis:
        if request.param == "valkey":
            made.append(connect(request.getfixturevalue("redis_url")))
        else:
            made.append(fakeredis.FakeRedis(server=fake))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def store(backend: Callable[[], redis.Redis]) -> Iterator[Store]:
    """A store whose time stands still. After the test nothing may be left that has no reason to stay."""
    made = make_store(backend())
    yield made
    check_invariants(made)


@pytest.fixture
def valkey_store(redis_client: redis.Redis, redis_url: str) -> Iterator[Store]:
    """As `store`, on the real server alone. `INFO`, `MONITOR`, real expiry."""
    client = connect(redis_url)
    made = make_store(client)
    yield made
    check_invariants(made)
    client.close()


@pytest.fixture
def another(backend: Callable[[], redis.Redis]) -> Callable[..., Store]:
    """`another()`: a second process's store on the same server, over a connection of its own."""

    def make(**values: Any) -> Store:
        return make_store(backend(), **values)

    return make


@pytest.fixture
def sweeper(store: Store) -> Sweeper:
    return sweeper_of(store)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if tried:
        terminalreporter.write_line(summary())
