"""What the server is and what it promises, as far as reconcile needs to know.

"No start marker" proves that a call never started only if Redis lost nothing since point A.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import redis


class ServerProbe(Protocol):
    """Asks the server who it is."""

    identity_commands: tuple[tuple[str, ...], ...]

    def identity(self, replies: Sequence[Any]) -> str:
        """Names this incarnation of the server *and* its history, from the answers to `identity_commands`; "" if it
        cannot be told, or if the server is not the master."""
        ...

    def loses_nothing(self, client: redis.Redis) -> bool:
        """Every acknowledged write outlives a restart, and this server never was a replica."""
        ...


class InfoProbe:
    """The real thing, from INFO and CONFIG GET."""

    identity_commands: tuple[tuple[str, ...], ...] = (("INFO", "server"), ("INFO", "replication"))

    def identity(self, replies: Sequence[Any]) -> str:
        server, replication = replies
        run_id, role = _field(server, "run_id"), _field(replication, "role")
        history = _field(replication, "master_replid")
        # A server that was made a replica and promoted again keeps its run id, but not its history.
        return f"{run_id}:{history}" if run_id and history and role == "master" else ""

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

    identity_commands: tuple[tuple[str, ...], ...] = (("PING",),)

    def __init__(self, name: str = "fixed", *, durable: bool = False) -> None:
        self.name = name
        self.durable = durable

    def identity(self, replies: Sequence[Any]) -> str:
        return self.name

    def loses_nothing(self, client: redis.Redis) -> bool:
        return self.durable


def _field(reply: Any, name: str) -> str:
    """One line of an INFO answer, as it came or as redis-py made a dict of it."""
    if isinstance(reply, dict):
        return str(reply.get(name, ""))
    text = reply.decode() if isinstance(reply, bytes) else str(reply)
    found = re.search(rf"^{name}:(\w+)", text, re.MULTILINE)
    return found.group(1) if found else ""
