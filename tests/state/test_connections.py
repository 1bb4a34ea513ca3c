"""The proof that works across hosts: the server has lost the connection that kept a lease. On a real server; the
holder's process is never looked at, its owner field is another host's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis

from tests.state.kit import CALL, T, at_a, claim, claimed, entry_for, field, lapse, new_task, number, status
from worker.proofs import GRACE_S, Proofs
from worker.state.lease import Holder
from worker.state.server import InfoProbe
from worker.state.standing import text
from worker.state.store import Store
from worker.state.task import Status
from worker.state.transact import connect
from worker.state.views import Views

pytestmark = pytest.mark.server


@dataclass
class Watch:
    """A holder whose heartbeat has a connection of its own, and a sweeper's eyes with a clock to turn."""

    store: Store
    beat: Store
    now: float = 0.0

    def __post_init__(self) -> None:
        self.proofs = Proofs(self.store.client, lambda: self.now)

    def look(self) -> list[tuple[str, str | None]]:
        """(words, connection) of each proof there is now."""
        views = Views(self.store.client, self.store.keys)
        running = list(views.running())
        return [(proof.words, proof.beat) for _, proof in self.proofs.of(running, views.now_ms())]

    def later(self) -> list[tuple[str, str | None]]:
        self.now += GRACE_S + 0.1
        return self.look()

    def cut(self) -> None:
        """What the kernel of a killed process does to its sockets."""
        self.beat.client.connection_pool.disconnect()

    def recover(self, found: list[tuple[str, str | None]]) -> Status | None:
        ((words, beat),) = found
        fence = text(self.store.client.get(self.store.keys.epoch(T)))
        return self.store.recover(T, proof=words, fence=fence, beat=beat)


@pytest.fixture
def watch(valkey_store: Store, redis_url: str) -> Iterator[Watch]:
    client = connect(redis_url)
    beat = Store(client, valkey_store.writes.dispatcher, clock=valkey_store.clock)
    valkey_store.probe = beat.probe = InfoProbe()
    yield Watch(valkey_store, beat)
    client.close()


def beating(watch: Watch) -> Holder:
    holder = claimed(watch.store)
    watch.beat.renew(holder)
    return holder


def test_a_connection_that_stays_away_for_a_second_is_a_proof(watch: Watch) -> None:
    beating(watch)
    assert watch.later() == []
    watch.cut()
    assert watch.look() == [], "one look is no proof: a heartbeat that was cut needs a moment to come back"
    found = watch.later()
    assert len(found) == 1
    assert "is gone" in found[0][0]
    assert watch.recover(found) is Status.QUEUED
    assert (number(watch.store, "crashes"), watch.later()) == (1, [])


def test_a_holder_that_lives_and_beats_is_never_proven_gone(watch: Watch) -> None:
    beating(watch)
    assert [watch.later() for _ in range(3)] == [[]] * 3


def test_a_heartbeat_that_was_cut_and_came_back_is_alive(watch: Watch) -> None:
    """An operator's CLIENT KILL, a proxy's restart: back under another number, which is written down."""
    holder = beating(watch)
    before = field(watch.store, "beat")
    watch.cut()
    assert watch.look() == []
    watch.beat.renew(holder)
    assert field(watch.store, "beat") != before
    assert [watch.later(), watch.later()] == [[], []]


def test_one_that_comes_back_between_the_proof_and_the_verb_keeps_its_task(watch: Watch) -> None:
    holder = beating(watch)
    watch.cut()
    watch.look()
    found = watch.later()
    watch.beat.renew(holder)
    assert watch.recover(found) is None
    assert status(watch.store) is Status.RUNNING


def test_a_side_effect_that_may_be_going_on_unseen_waits_for_a_better_proof(watch: Watch) -> None:
    """Taken over then, a mere blip of the network would become an unknown outcome."""
    holder = at_a(watch.store)
    watch.beat.renew(holder)
    watch.store.mark_started(holder, CALL)
    watch.cut()
    watch.look()
    assert watch.later() == []
    watch.store.record_result(holder, CALL, entry_for(CALL))
    watch.look()
    assert len(watch.later()) == 1


def test_one_that_begins_a_side_effect_between_the_proof_and_the_verb_keeps_its_task(watch: Watch) -> None:
    holder = at_a(watch.store)
    watch.beat.renew(holder)
    watch.cut()
    watch.look()
    found = watch.later()
    watch.store.mark_started(holder, CALL)
    assert watch.recover(found) is None


@pytest.mark.parametrize("effect", ["read_only", "idempotent"])
def test_a_call_that_may_be_repeated_waits_for_nothing(watch: Watch, effect: str) -> None:
    holder = at_a(watch.store)
    watch.beat.renew(holder)
    watch.store.mark_started(holder, CALL, effect)
    watch.cut()
    watch.look()
    assert watch.recover(watch.later()) is Status.QUEUED


def test_cut_off_is_not_dead_so_verify_is_not_believed_when_it_says_not_yet(watch: Watch) -> None:
    holder = beating(watch)
    watch.cut()
    watch.look()
    watch.recover(watch.later())
    assert watch.store.client.hexists(watch.store.keys.started(T), f"lapsed:{holder.epoch}")


def test_the_next_holder_is_not_judged_by_the_connection_of_the_last_one(watch: Watch) -> None:
    beating(watch)
    watch.cut()
    watch.look()
    watch.recover(watch.later())
    claim(watch.store)
    assert field(watch.store, "beat") == ""
    assert [watch.later(), watch.later()] == [[], []]


def test_of_another_incarnation_of_the_server_nothing_is_known(watch: Watch) -> None:
    """After a restart the numbers begin anew: that one is missing means nothing."""
    beating(watch)
    epoch, _, rest = field(watch.store, "beat").partition(":")
    watch.store.client.hset(watch.store.keys.task(T), "beat", f"{epoch}:{'0' * 40}:{rest.partition(':')[2]}9")
    watch.cut()
    assert [watch.look(), watch.later(), watch.later()] == [[], [], []]


def test_a_number_that_an_older_baton_left_lying_says_nothing_of_the_holder_it_has_claimed_for(watch: Watch) -> None:
    """In the middle of a deploy: its claim does not clear the field, and its heartbeat does not write it. Healthy tasks
    of old workers were recovered until they were dead."""
    beating(watch)
    old = field(watch.store, "beat")
    watch.cut()
    watch.look()
    watch.recover(watch.later())
    claim(watch.store)
    watch.store.client.hset(watch.store.keys.task(T), "beat", old)
    assert [watch.look(), watch.later(), watch.later()] == [[], [], []]


@pytest.mark.parametrize("beat", ["1:x:y", "1:", ":", "no number", "1::7 8"])
def test_one_damaged_number_does_not_hide_the_other_deaths(watch: Watch, beat: str) -> None:
    watch.store.create(new_task("damaged"))
    claim(watch.store, "damaged")
    watch.store.client.hset(watch.store.keys.task("damaged"), "beat", beat)
    beating(watch)
    watch.cut()
    watch.look()
    assert len(watch.later()) == 1


def test_a_cut_is_no_reason_to_end_a_task(watch: Watch) -> None:
    """Three blips of a network made a healthy task dead. The last crash of the row takes another proof."""
    store = watch.store
    for crash in range(store.policy.crashes_in_row_max):
        holder = beating(watch) if crash == 0 else claim(store)
        watch.beat.renew(holder)
        watch.cut()
        watch.look()
        last = watch.recover(watch.later())
    assert last is None
    assert status(store) is Status.RUNNING
    lapse(store)
    assert store.recover(T, proof="its lease ran out") is Status.DEAD


def test_a_full_server_that_cannot_note_the_new_number_forgets_the_old_one(watch: Watch) -> None:
    """When it had room again, a sweeper took a live holder's task for the number of a connection long replaced."""
    holder = beating(watch)
    watch.cut()
    watch.beat._renew(holder, with_index=False)
    assert field(watch.store, "beat") == ""
    assert [watch.look(), watch.later()] == [[], []]
    watch.beat.renew(holder)
    assert field(watch.store, "beat") == holder.beat != ""


def test_where_nobody_may_list_clients_the_proof_is_left_out_and_said_so_once(
    watch: Watch, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    redis_client.acl_setuser(
        "plain", enabled=True, nopass=True, keys=["*"], channels=["*"], categories=["+@all"], commands=["-client|list"]
    )
    try:
        beating(watch)
        watch.cut()
        path = redis_client.connection_pool.connection_kwargs["path"]
        client = redis.Redis(unix_socket_path=path, username="plain", password="x", retry=None)
        watch.proofs = Proofs(client, lambda: watch.now)
        with caplog.at_level(logging.WARNING):
            assert [watch.look(), watch.later(), watch.later()] == [[], [], []]
        assert [record.message.split()[0] for record in caplog.records] == ["no-client-list"]
        client.close()
    finally:
        redis_client.acl_deluser("plain")


def test_a_user_that_may_not_ask_for_its_number_beats_all_the_same(watch: Watch, redis_client: redis.Redis) -> None:
    """The proof is left out, the lease is not."""
    redis_client.acl_setuser(
        "plain", enabled=True, nopass=True, keys=["*"], channels=["*"], categories=["+@all"], commands=["-client|id"]
    )
    try:
        path = redis_client.connection_pool.connection_kwargs["path"]
        client = redis.Redis(unix_socket_path=path, username="plain", password="x", retry=None)
        holder = claimed(watch.store)
        Store(client, watch.store.writes.dispatcher, clock=watch.store.clock).renew(holder)
        assert field(watch.store, "beat") == ""
        client.close()
    finally:
        redis_client.acl_deluser("plain")
