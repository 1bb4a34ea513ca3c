"""One fleet per module: workers take seconds to start, and a module's tests share theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ops.valkey import Server
from tests.support.fleet import Fleet, running_fleet


@pytest.fixture(scope="module")
def fleet(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """No process runs yet but the server and the model."""
    with running_fleet(tmp_path_factory.mktemp("fleet"), server.url) as running:
        yield running
