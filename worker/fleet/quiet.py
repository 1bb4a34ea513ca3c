"""Workers that were told to be quiet: they keep what they have and take no more, until they are told to resume.

Told by name, through a small set in Redis (`baton workers quiet`, `resume`); looked at before and after each pop.
"""

from __future__ import annotations

from contextlib import suppress

import redis

from worker.state.keys import Keys

POLL_S = 0.5


class Quiet:
    """`client` may be the one of RQ's worker: each question is one command."""

    def __init__(self, client: redis.Redis, keys: Keys, name: str) -> None:
        self._client = client
        self._key = keys.quiet()
        self._name = name

    def asked(self) -> bool:
        """Is this worker to be quiet? False while Redis does not answer: nothing can be taken then anyway."""
        with suppress(redis.RedisError, OSError):
            return bool(self._client.sismember(self._key, self._name))
        return False

    def forget(self) -> None:
        """This worker begins or ends; its name may be somebody else's afterwards."""
        with suppress(redis.RedisError, OSError):
            self._client.srem(self._key, self._name)
