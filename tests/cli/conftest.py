"""Commands against the session's server."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.support.here import Here


@pytest.fixture
def commands(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Here:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_REDIS_URL", redis_url)
    return Here(capsys)
