"""A missing start marker proves something only on a server that lost nothing since point A."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ops import valkey
from tests.state.kit import T, at_a, make_store
from tests.support.waiting import wait_until
from worker.state.load import load
from worker.state.server import InfoProbe
from worker.state.store import Store
from worker.state.transact import connect

pytestmark = pytest.mark.server


def trusted(store: Store) -> bool:
    store.recover(T, proof="test", fence=(store.client.get(store.keys.epoch(T)) or b"").decode())
    delivery = int(store.client.hget(store.keys.task(T), "delivery") or 0)
    holder: Any = store.claim(T, delivery, {})
    return load(store.client, store.keys, store.probe, holder).markers_trusted


def test_a_server_that_was_a_replica_in_between_keeps_its_run_id_and_not_its_history(short_dir: Path) -> None:
    """It took over the data of another one, and with it lost a marker; promoted again, it looked like its old self."""
    options = ["--repl-diskless-sync-delay", "0"]
    with (
        valkey.ensure(short_dir / "x", port=0, extra=options) as x,
        valkey.ensure(short_dir / "y", port=0, extra=options) as y,
    ):
        client, other = connect(x.url), connect(y.url)
        store = make_store(client)
        store.probe = InfoProbe()
        at_a(store)
        assert trusted(store), "control: the same server, and no excursion"
        x_port, y_port = (int(server.url.rpartition(":")[2].partition("/")[0]) for server in (x, y))
        other.replicaof("127.0.0.1", x_port)
        wait_until(lambda: other.info("replication").get("master_link_status") == "up", "Y to follow X")
        other.replicaof("NO", "ONE")
        client.replicaof("127.0.0.1", y_port)
        wait_until(lambda: client.info("replication").get("master_link_status") == "up", "X to follow Y")
        client.replicaof("NO", "ONE")
        assert not trusted(store)
        client.close()
        other.close()
