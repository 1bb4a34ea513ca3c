"""Where a drill takes place: a directory, a server, a scripted model, a nursery. All of it its own."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from ops import valkey
from ops.drill import effects
from ops.drill.fleet import EnvironmentFailed, Fleet
from ops.drill.nursery import CLASS_VARIABLE, NONCE_KEY, NONCE_VARIABLE, PATH_VARIABLE, SABOTAGE_VARIABLE
from ops.processes import client as retryless_client
from ops.processes import lock_is_free, try_lock
from ops.scripted_model import ScriptedModel
from worker.dispatch import open_store
from worker.errors import InvalidInput, RedisUnavailable
from worker.settings import Settings, load_settings
from worker.state.store import Store

LEASE_MS = 3_000
REQUESTS, LOCK = "requests.jsonl", "drill.lock"
OURS = (LOCK, REQUESTS, effects.FILE, "kills.jsonl", "*.log", "*.once", "valkey", "workspace")
NOT_OURS = ("BATON_", "ANTHROPIC_", "RQ_", "CRASH_", "DRILL_", "COVERAGE_PROCESS")


@dataclass
class Arena:
    """What a run needs. `client` and `store` are the drill's own, beside the fleet's."""

    home: Path
    settings: Settings
    server: valkey.Server
    model: ScriptedModel
    fleet: Fleet
    client: redis.Redis
    store: Store


@contextmanager
def open_arena(
    home: Path,
    script: Mapping[str, Any] | Path,
    tools: str,
    *,
    lease_ms: int = LEASE_MS,
    sabotage: str = "",
    worker_class: str = "fork",
) -> Iterator[Arena]:
    """Everything up and everything imported, nothing forked yet. Raises EnvironmentFailed."""
    if not Path("/proc/self/stat").exists():
        raise EnvironmentFailed("a drill finds whom to kill in /proc, and here is none: it needs Linux")
    with ExitStack() as stack:
        try:
            server = valkey.ensure(home / "valkey", with_parent=True)
        except RedisUnavailable as error:
            raise EnvironmentFailed(f"the drill's own server did not start: {error}") from error
        stack.callback(_end_server, server.directory)
        model = stack.enter_context(ScriptedModel(_plain(script), log=home / REQUESTS))
        settings = load_settings({}, **_settings(home, server.url, lease_ms))
        client = retryless_client(server.url, timeout=5)
        stack.callback(client.close)
        nonce = secrets.token_hex(16)
        client.set(NONCE_KEY, nonce)
        environ = _environment(settings, model.url, home)
        environ |= {
            effects.TOOLS_VARIABLE: tools,
            NONCE_VARIABLE: nonce,
            SABOTAGE_VARIABLE: sabotage,
            CLASS_VARIABLE: worker_class,
        }
        fleet = stack.enter_context(Fleet(home, environ))
        fleet.await_ready()
        yield Arena(home, settings, server, model, fleet, client, open_store(settings, client))


@contextmanager
def fresh(home: Path) -> Iterator[Path]:
    """An empty directory for one drill at a time; clears away only what an earlier one left there, its server too."""
    home = home.resolve()
    found = list(home.iterdir()) if home.exists() else []
    foreign = [left for left in found if left.is_symlink() or not any(map(left.match, OURS))]
    if foreign or (found and not (home / LOCK).exists()):
        raise InvalidInput(
            f"{home} holds {(foreign or found)[0].name}, which is not a drill's; name another with --dir"
        )
    home.mkdir(parents=True, exist_ok=True)
    lock = try_lock(home / LOCK)
    if lock is None:
        raise InvalidInput(f"another drill is going on in {home}; name another directory with --dir")
    try:
        _end_server(home / "valkey")
        for left in home.iterdir():
            if left.name != LOCK:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        (home / "workspace").mkdir()
        (home / REQUESTS).touch()
        yield home
    finally:
        os.close(lock)


def _end_server(directory: Path) -> None:
    """Whatever server the directory has now: it was killed and started again since."""
    record = valkey.recorded(directory)
    if record and not lock_is_free(directory / "server.lock"):
        valkey.Server(record.url, record.pid, directory, True).kill()


def _plain(script: Mapping[str, Any] | Path) -> Any:
    return script if isinstance(script, Path) else dict(script)


def _settings(home: Path, url: str, lease_ms: int) -> dict[str, Any]:
    """A short lease, so that what waits for its end fits into a drill; and no limit to crashes, which a drill has more
    of than any honest worker."""
    return {
        "redis_url": url,
        "workspace": home / "workspace",
        "tools": "ops.drill.recorded",
        "lease_ttl_ms": lease_ms,
        "lease_margin_ms": lease_ms // 6,
        "verify_settle_s": 1,
        "drain_grace_s": 5,
        "concurrency": 200,
        "sweep_period_s": 0.2,
        "redeliver_grace_ms": 1_000,
        "crashes_in_row_max": 10_000,
        "crashes_max": 10_000,
        "turns_max": 1_000,
    }


def _environment(settings: Settings, model_url: str, home: Path) -> dict[str, str]:
    """The user's own, for their tools, without anything that changes how Baton, RQ or the client work."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_OURS)}
    changed = settings.model_dump(exclude_defaults=True)
    return {
        **kept,
        **{f"BATON_{name.upper()}": str(value) for name, value in changed.items()},
        "BATON_QUEUE": settings.queue,
        PATH_VARIABLE: str(Path.cwd()),
        effects.LOG_VARIABLE: str(home / effects.FILE),
        "ANTHROPIC_BASE_URL": model_url,
        "ANTHROPIC_API_KEY": "scripted",
        "NO_PROXY": "127.0.0.1",
    }
