"""What the server is and what it promises, as far as reconcile needs to know.

"No start marker" proves that a call never started only if Redis lost nothing since point A (design 4.4).
"""

from __future__ import annotations

import re
from typing import Protocol

import redis


class ServerProbe(Protocol):
    """Asks the server who it is."""

    run_id_command: tuple[str, ...]

    def run_id(self, reply: bytes | str) -> str:
        """The incarnation's name, from the answer to `run_id_command`."""
        ...

    def loses_nothing(self, client: redis.Redis) -> bool:
        """Every acknowledged write outlives a restart, and this server never was a replica."""
        ...


class InfoProbe:
    """The real thing, from INFO and CONFIG GET."""

    run_id_command: tuple[str, ...] = ("INFO", "server")

    def run_id(self, reply: bytes | str) -> str:
        text = reply.decode() if isinstance(reply, bytes) else str(reply)
        found = re.search(r"^run_id:(\w+)", text, re.MULTILINE)
        return found.group(1) if found else ""

    def loses_nothing(self, client: redis.Redis) -> bool:
        try:
            persistence = client.info("persistence")
            replication = client.info("replication")
            fsync = client.config_get("appendfsync")
        except redis.ResponseError:  # an ACL without CONFIG: nothing is proven, so nothing is trusted
            return False
        return (
            int(persistence.get("aof_enabled", 0)) == 1
            and fsync.get("appendfsync") == "always"
            and set(str(replication.get("master_replid2", ""))) == {"0"}
            and replication.get("role") == "master"
        )


class FixedProbe:
    """For servers without INFO (fakeredis): says what it was told. Shipped for tests."""

    run_id_command: tuple[str, ...] = ("PING",)

    def __init__(self, name: str = "fixed", *, durable: bool = False) -> None:
        self.name = name
        self.durable = durable

    def run_id(self, reply: bytes | str) -> str:
        return self.name

    def loses_nothing(self, client: redis.Redis) -> bool:
        return self.durable
