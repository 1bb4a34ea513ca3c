"""What a test leaves behind in Redis."""

from __future__ import annotations

from collections.abc import Callable

import redis


def leftover_keys(client: redis.Redis) -> dict[str, int]:
    """Every key with its time to live in milliseconds; -1 for a key that stays for ever."""
    names = sorted(client.scan_iter(count=1000))
    return {
        name.decode(errors="replace") if isinstance(name, bytes) else name: ttl_ms
        for name in names
        if (ttl_ms := client.pttl(name)) != -2  # -2: expired while we were looking
    }


def assert_no_leaks(client: redis.Redis, allowed: Callable[[str], bool] = lambda key: False) -> None:
    """Each key ends by itself or is allowed to stay (an index, say): nothing else may outlive its task."""
    leaked = [key for key, ttl_ms in leftover_keys(client).items() if ttl_ms < 0 and not allowed(key)]
    assert not leaked, f"keys without a ttl were left behind: {leaked}"
