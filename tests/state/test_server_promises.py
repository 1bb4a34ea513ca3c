"""What is refused at start, and what a server promises, in words. Real servers, one for each way to run one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from ops import valkey
from ops.processes import free_port
from tests.state.kit import make_store
from worker.errors import RedisUnavailable, ServerUnfit
from worker.state.server import InfoProbe, require_fit
from worker.state.store import Store
from worker.state.transact import connect

pytestmark = pytest.mark.server


def asked(url: str) -> Store:
    store = make_store(connect(url))
    store.probe = InfoProbe()
    return store


@pytest.mark.parametrize(
    ("options", "promise"),
    [
        pytest.param((), "survives a crash of Redis, and a power loss", id="always"),
        pytest.param(("--appendfsync", "everysec"), "survives a crash of Redis; may lose up to a second on power loss",
                     id="everysec"),
        pytest.param(("--appendfsync", "no"), "survives a crash of Redis; on power loss, may lose what the kernel "
                     "had not written yet", id="no-fsync"),
        pytest.param(("--appendonly", "no"), "keeps nothing: a crash or restart of Redis loses every task",
                     id="nothing"),
        pytest.param(("--appendonly", "no", "--save", "60 1"), "a crash of Redis loses what was written since its last "
                     "snapshot (appendonly no)", id="snapshots"),
        pytest.param(("--replicaof", "127.0.0.1 1"), "it is a replica and stores nothing for us", id="replica"),
    ],
)  # fmt: skip
def test_the_promise_of_a_server_is_told_in_words(tmp_path: Path, options: tuple[str, ...], promise: str) -> None:
    with valkey.ensure(tmp_path / "s", extra=options) as server:
        store = asked(server.url)
        with closing(store.client):
            assert store.promise() == promise
            store.require_fit()


@pytest.mark.parametrize("policy", ["volatile-lru", "allkeys-lru", "volatile-ttl"])
def test_a_server_that_may_drop_keys_is_refused_unless_somebody_accepts_that(redis_url: str, policy: str) -> None:
    """F01: volatile policies take the locks first, the only keys of a live task that expire."""
    store = asked(redis_url)
    with closing(store.client):
        store.client.config_set("maxmemory-policy", policy)
        try:
            with pytest.raises(ServerUnfit, match=f"maxmemory-policy {policy}.*BATON_ALLOW_EVICTION"):
                store.require_fit()
            store.require_fit(force=True)
        finally:
            store.client.config_set("maxmemory-policy", "noeviction")
        store.require_fit()


def test_a_cluster_is_refused_whatever_anybody_accepts(tmp_path: Path) -> None:
    """F09: RQ cannot run on one."""
    with valkey.ensure(
        tmp_path / "s", port=0, extra=("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    ) as server:
        store = asked(server.url)
        with closing(store.client), pytest.raises(ServerUnfit, match="cluster mode"):
            store.require_fit(force=True)


def test_a_user_that_may_ask_nothing_is_told_that_nothing_is_known(redis_url: str, tmp_path: Path) -> None:
    with valkey.ensure(tmp_path / "s", port=0) as server:
        admin = connect(server.url)
        admin.acl_setuser("plain", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-info"])
        store = asked(server.url.replace("redis://", "redis://plain:x@"))
        with closing(admin), closing(store.client):
            store.require_fit()
            assert store.promise().startswith("not known")


def test_without_config_the_promise_says_what_it_does_not_know(tmp_path: Path) -> None:
    with valkey.ensure(tmp_path / "s", port=0) as server:
        admin = connect(server.url)
        admin.acl_setuser("plain", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-config"])
        store = asked(server.url.replace("redis://", "redis://plain:x@"))
        with closing(admin), closing(store.client):
            assert (
                store.promise() == "survives a crash of Redis; whether a power loss costs anything it does not tell us"
            )


def test_a_server_that_is_away_is_unavailable_not_unfit() -> None:
    store = asked("redis://127.0.0.1:1/0")
    with pytest.raises(RedisUnavailable):
        store.require_fit()


def test_nothing_wrong_needs_no_force() -> None:
    require_fit("")
    require_fit("", force=True)
