"""What the server is and what it promises, as far as reconcile needs to know.

"No start marker" proves that a call never started only if Redis lost nothing since point A. At the start of
a process, a server that would lose tasks is refused, and what it promises is told in words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import redis
from redis.exceptions import NoPermissionError

from worker.errors import ServerUnfit

_LINE = re.compile(r"^(\w+):(\w+)", re.MULTILINE)  # of an INFO answer


class ServerProbe(Protocol):
    """Asks the server who it is."""

    identity_commands: tuple[tuple[str, ...], ...]
    connection_commands: tuple[tuple[str, ...], ...]

    def connection(self, replies: Sequence[Any]) -> str:
        """Names the connection that asked, and the server's incarnation, from the answers (or refusals) to
        `connection_commands`: `run id:client id`; "" if it cannot be told."""
        ...

    def identity(self, replies: Sequence[Any]) -> str:
        """Names this incarnation of the server *and* its history, from the answers to `identity_commands`; "" if it
        cannot be told, or if the server is not the master."""
        ...

    def unfit(self, client: redis.Redis) -> str:
        """Why no task should be trusted to this server and what to do about it; "" if there is no reason."""
        ...

    def promise(self, client: redis.Redis) -> str:
        """What it keeps of what it has acknowledged, in words."""
        ...

    def loses_nothing(self, client: redis.Redis) -> bool:
        """Every acknowledged write outlives a restart, and this server never was a replica."""
        ...


class InfoProbe:
    """The real thing, from INFO and CONFIG GET."""

    identity_commands: tuple[tuple[str, ...], ...] = (("INFO", "server"), ("INFO", "replication"))
    connection_commands: tuple[tuple[str, ...], ...] = (("INFO", "server"), ("CLIENT", "ID"))

    def connection(self, replies: Sequence[Any]) -> str:
        server, number = replies
        if isinstance(server, Exception) or isinstance(number, Exception):
            return ""
        run_id = _field(server, "run_id")
        return f"{run_id}:{number}" if run_id else ""

    def identity(self, replies: Sequence[Any]) -> str:
        server, replication = replies
        run_id, role = _field(server, "run_id"), _field(replication, "role")
        history = _field(replication, "master_replid")
        # A server that was made a replica and promoted again keeps its run id, but not its history.
        return f"{run_id}:{history}" if run_id and history and role == "master" else ""

    def unfit(self, client: redis.Redis) -> str:
        try:
            return _unfit(client.info())
        except NoPermissionError:  # whoever set up such a user has looked at the server himself
            return ""

    def promise(self, client: redis.Redis) -> str:
        try:
            return _promise(client.info(), _config(client, "appendfsync"), _config(client, "save"))
        except NoPermissionError:
            return "not known: our user may not ask for it (INFO)"

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


_EVICTS = "Redis may drop keys"


def require_fit(unfit: str, *, force: bool = False) -> None:
    """Raises ServerUnfit with the reason, if there is one; `force` allows a server that may evict keys."""
    if unfit and not (force and unfit.startswith(_EVICTS)):
        raise ServerUnfit(unfit)


def _unfit(info: dict[str, Any]) -> str:
    if int(info.get("cluster_enabled", 0)):
        return "Redis runs in cluster mode, and RQ cannot: use a single server, with replicas or Sentinel if you like"
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy == "noeviction":
        return ""
    return (
        f"{_EVICTS} of tasks when its memory is full (maxmemory-policy {policy}): CONFIG SET maxmemory-policy "
        "noeviction, or set BATON_ALLOW_EVICTION=1 if you accept that"
    )


def _promise(info: dict[str, Any], fsync: str, save: str) -> str:
    if info.get("role") in ("slave", "replica"):
        return "it is a replica and stores nothing for us"
    if not int(info.get("aof_enabled", 0)):
        if save == "":
            return "keeps nothing: a crash or restart of Redis loses every task"
        return "a crash of Redis loses what was written since its last snapshot (appendonly no)"
    kept = {
        "always": "survives a crash of Redis, and a power loss",
        "everysec": "survives a crash of Redis; may lose up to a second on power loss",
        "no": "survives a crash of Redis; on power loss, may lose what the kernel had not written yet",
    }.get(fsync, "survives a crash of Redis; whether a power loss costs anything it does not tell us")
    replicas = int(info.get("connected_slaves", 0))
    return f"{kept}; a failover to a replica may lose the last writes" if replicas else kept


def _config(client: redis.Redis, name: str) -> str:
    """A setting of the server; "?" if it will not tell."""
    try:
        return str(client.config_get(name).get(name, "?"))
    except redis.ResponseError:
        return "?"


class FixedProbe:
    """For servers without INFO (fakeredis): says what it was told. Shipped for tests."""

    identity_commands: tuple[tuple[str, ...], ...] = (("PING",),)
    connection_commands: tuple[tuple[str, ...], ...] = ()

    def __init__(self, name: str = "fixed", *, durable: bool = False) -> None:
        self.name = name
        self.durable = durable

    def connection(self, replies: Sequence[Any]) -> str:
        return ""

    def identity(self, replies: Sequence[Any]) -> str:
        return self.name

    def unfit(self, client: redis.Redis) -> str:
        return ""

    def promise(self, client: redis.Redis) -> str:
        return "not known"

    def loses_nothing(self, client: redis.Redis) -> bool:
        return self.durable


def _field(reply: Any, name: str) -> str:
    """One line of an INFO answer, as it came or as redis-py made a dict of it."""
    if isinstance(reply, dict):
        return str(reply.get(name, ""))
    text = reply.decode() if isinstance(reply, bytes) else str(reply)
    found = next((value for key, value in _LINE.findall(text) if key == name), "")
    return str(found)
