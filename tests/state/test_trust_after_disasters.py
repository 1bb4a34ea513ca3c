"""What a new holder believes of a server that was killed, cut short or replaced. Real servers, the real runtime,
effects counted outside Redis.

The question is always the same: a call has no start marker. Does that prove that it never ran?
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ops import valkey
from tests.support.agents import Bench, Died, Line, T, calls, say, use
from tests.support.waiting import wait_until
from worker.answers import STATE_UNKNOWN
from worker.dispatch import open_store
from worker.state.server import InfoProbe
from worker.state.store import Store
from worker.state.task import Status
from worker.state.transact import connect
from worker.state.views import Views

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]

EVERY_SECOND = ("--appendfsync", "everysec")
NEVER_STARTED = ("after-save-a", 1)
HAPPENED = ("after-effect", 1)


class Served(Bench):
    """A bench on a real server, which may be another one from some moment on."""

    def __init__(self, url: str) -> None:
        self.url = url
        super().__init__(calls(use("send", line="a")), say("done"))
        self.enqueue()

    def open(self, line: Line) -> Store:
        store = open_store(self.settings, connect(self.url))
        store.clock, store.probe = self.clock, InfoProbe()
        return store

    def move(self, url: str) -> None:
        self.url = url
        self.store = self.open(Line())
        self.views = Views(self.store.client, self.store.keys, self.clock)

    def die_at(self, point: tuple[str, int], at_a: Callable[[], object] = lambda: None) -> None:
        """The first attempt ends there; `at_a` runs when point A is saved."""

        def die() -> None:
            raise Died

        hooks = {("after-save-a", 1): at_a, point: die} if point != NEVER_STARTED else {point: die}
        with self.hooked(hooks), pytest.raises(Died):
            self.deliver()

    def go_on(self) -> tuple[list[str], bool]:
        """(what happened in the world, the model was told that the call's state is unknown)."""
        self.take_over()
        assert self.run() is Status.SUCCEEDED
        self.check(echoes=False)
        (result,) = self.results()
        assert result["content"] in (STATE_UNKNOWN, "did send a")
        return self.effects, result["content"] == STATE_UNKNOWN


def restarted(server: valkey.Server, extra: tuple[str, ...]) -> valkey.Server:
    """After a kill -9."""
    server.kill()
    return valkey.ensure(server.directory, port=0, extra=extra)


# -- a crash of the server ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "effects", "unknown"),
    [pytest.param((), ["send a"], False, id="always"), pytest.param(EVERY_SECOND, [], True, id="everysec")],
)
def test_after_a_crash_a_missing_marker_counts_if_every_write_was_on_disk_before_it_was_acknowledged(
    short_dir: Path, options: tuple[str, ...], effects: list[str], unknown: bool
) -> None:
    server = valkey.ensure(short_dir / "s", port=0, extra=options)
    bench = Served(server.url)
    bench.die_at(NEVER_STARTED)
    with restarted(server, options) as again:
        bench.move(again.url)
        assert bench.go_on() == (effects, unknown)


@pytest.mark.parametrize("options", [(), EVERY_SECOND], ids=["always", "everysec"])
def test_without_a_crash_a_missing_marker_counts_on_any_server(short_dir: Path, options: tuple[str, ...]) -> None:
    """The control."""
    with valkey.ensure(short_dir / "s", port=0, extra=options) as server:
        bench = Served(server.url)
        bench.die_at(NEVER_STARTED)
        assert bench.go_on() == (["send a"], False)


@pytest.mark.parametrize(
    ("options", "effects"), [pytest.param(EVERY_SECOND, 1, id="everysec"), pytest.param((), 2, id="always")]
)
def test_a_log_that_lost_its_tail_is_believed_only_where_a_crash_cannot_do_that(
    short_dir: Path, options: tuple[str, ...], effects: int
) -> None:
    """A power loss may take the last second of an everysec log, with the start marker in it. `always` rules that out,
    and so is believed: whoever cuts such a log by hand, or restores an old copy, has taken the proof away."""
    server = valkey.ensure(short_dir / "s", port=0, extra=options)
    (log,) = (server.directory / "appendonlydir").glob("*.incr.aof")
    sizes: list[int] = []
    bench = Served(server.url)
    bench.die_at(HAPPENED, at_a=lambda: sizes.append(log.stat().st_size))
    assert bench.effects == ["send a"]
    server.kill()
    with log.open("r+b") as file:
        file.truncate(sizes[0])
    with valkey.ensure(server.directory, port=0, extra=options) as again:
        bench.move(again.url)
        assert not bench.store.client.exists(bench.store.keys.started(T)), "the marker is lost"
        assert bench.go_on() == (["send a"] * effects, effects == 1)


# -- a failover --------------------------------------------------------------------------------------------------------


class Pair:
    """A master and its replica, both of which write everything to disk at once."""

    def __init__(self, home: Path) -> None:
        options = ("--repl-diskless-sync-delay", "0")
        self.master = valkey.ensure(home / "x", port=0, extra=options)
        self.replica = valkey.ensure(home / "y", port=0, extra=options)
        self.other = connect(self.replica.url)
        self.other.replicaof("127.0.0.1", int(self.master.url.rpartition(":")[2].partition("/")[0]))
        wait_until(lambda: self.other.info("replication").get("master_link_status") == "up", "the replica to follow")

    def promote(self) -> None:
        """The replica has all so far, and becomes a master before the old one is dead: it gets no more."""
        with connect(self.master.url) as client:
            client.wait(1, 5_000)
        self.other.replicaof("NO", "ONE")

    def close(self) -> None:
        self.other.close()
        self.replica.stop()


def failed_over(pair: Pair) -> Served:
    """The call happened and was marked on a master whose replica got neither; the replica has its place."""
    bench = Served(pair.master.url)
    bench.die_at(HAPPENED, at_a=pair.promote)
    pair.master.kill()
    bench.move(pair.replica.url)
    assert not bench.store.client.exists(bench.store.keys.started(T)), "the marker is lost"
    return bench


def test_after_a_failover_that_lost_the_marker_the_call_is_not_run_a_second_time(short_dir: Path) -> None:
    """`appendfsync always` on both does not help: what the replica never got it could not write."""
    pair = Pair(short_dir)
    bench = failed_over(pair)
    assert bench.store.client.config_get("appendfsync") == {"appendfsync": "always"}
    assert bench.go_on() == (["send a"], True)
    pair.close()


def test_a_promise_that_forgot_failovers_would_run_it_twice(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sabotage: a server that writes everything to disk at once is believed, whatever it was before."""
    monkeypatch.setattr(InfoProbe, "loses_nothing", lambda self, client: True)
    pair = Pair(short_dir)
    assert failed_over(pair).go_on() == (["send a", "send a"], False)
    pair.close()


def test_known_edge_a_promoted_replica_that_was_restarted_looks_like_one_that_never_lost_anything(
    short_dir: Path,
) -> None:
    """A restart clears the memory of the promotion (`master_replid2`). ARCHITECTURE.md says so; this notices when it
    is no longer true."""
    pair = Pair(short_dir)
    bench = failed_over(pair)
    again = restarted(pair.replica, ())
    bench.move(again.url)
    assert bench.go_on() == (["send a", "send a"], False)
    pair.other.close()
    again.stop()
