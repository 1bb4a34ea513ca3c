"""Stored state that cannot be trusted: refused in plain words, nothing written, no byte changed (E07, E08, A09)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.state.kit import (
    AT_A,
    AT_B,
    CALL,
    T,
    at_a,
    at_b,
    begun,
    claimed,
    lapse,
    marked,
    new_task,
    nothing_written,
    queued,
    recorded,
    said,
)
from worker.errors import BatonError, CheckpointDamaged, CheckpointTooNew
from worker.state.lease import Holder
from worker.state.load import Loaded, load
from worker.state.store import Store

Damage = Callable[[Store], Any]


def load_as(store: Store, holder: Holder) -> Loaded:
    return load(store.client, store.keys, store.probe, holder)


def refused(store: Store, holder: Holder, kind: type[BatonError] = CheckpointDamaged) -> str:
    with nothing_written(store.client), pytest.raises(kind) as error:
        load_as(store, holder)
    words = str(error.value)
    assert words.isprintable()
    assert len(words) < 400
    return words


# -- the checkpoint's own fields -----------------------------------------------------------------------------------

FIELDS = ("version", "seq", "turns", "tokensUsed", "totalTokens", "pendingToolUse", "messageCount")
PADDED = {"empty": b"", "NULs": b"\x00" * 10, "null": b"null", "list": b"[]", "object": b"{}", "minus": b"-1"}


SOUND = {("tokensUsed", "object"), ("pendingToolUse", "null")}  # sound values of these fields
BAD = [*PADDED, "NUL-padded", "missing", "nested", "1_0", "+1", "wide"]  # wide: more digits than Python reads


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name in FIELDS for bad in BAD if (name, bad) not in SOUND])
def test_a_damaged_field_is_refused(store: Store, name: str, bad: str) -> None:
    holder, key = at_a(store), store.keys.checkpoint(T)
    good = store.client.hget(key, name)
    values = {**PADDED, "NUL-padded": good + b"\x00\x00", "nested": b"[" * 100_000, "wide": b"9" * 5_000}
    if bad == "missing":
        store.client.hdel(key, name)
    elif bad in ("1_0", "+1"):
        store.client.hset(key, name, bad)
    else:
        store.client.hset(key, name, values[bad])
    assert "checkpoint" in refused(store, holder)


@pytest.mark.parametrize("raw", ["1.0", "true", "", "0", "-1", "01", " 1", "1 ", "one", "²", '"1"', "9" * 5_000])
def test_a_version_that_is_not_ours_is_refused(store: Store, raw: str) -> None:
    holder = at_a(store)
    store.client.hset(store.keys.checkpoint(T), "version", raw)
    assert "version" in refused(store, holder)


@pytest.mark.parametrize("raw", ["2", "999"])
def test_a_newer_version_waits_for_a_worker_that_can_read_it(store: Store, raw: str) -> None:
    """A rolling deploy: not damage, so the task must not end (E08)."""
    holder = at_a(store)
    store.client.hset(store.keys.checkpoint(T), "version", raw)
    assert f"version {raw}" in refused(store, holder, CheckpointTooNew)


@pytest.mark.parametrize("tokens", ['{"input_tokens":"7"}', '{"input_tokens":null}', '{"input_tokens":true}', "7"])
def test_counters_that_cannot_be_counted_on_are_refused(store: Store, tokens: str) -> None:
    """Adding to them would be an error in the worker, in every attempt, until the task is dead."""
    holder = at_a(store)
    store.client.hset(store.keys.checkpoint(T), "tokensUsed", tokens)
    assert "tokensUsed" in refused(store, holder)


@pytest.mark.parametrize("pending", ["[]", "false", "0", '"toolu_1"', '[{"id":"toolu_2","name":"append"}]', "[1]"])
def test_pending_calls_that_are_not_those_of_the_last_message_are_refused(store: Store, pending: str) -> None:
    holder = at_a(store)
    store.client.hset(store.keys.checkpoint(T), "pendingToolUse", pending)
    assert "pendingToolUse" in refused(store, holder)


# -- the messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sixteenth", range(16))
@pytest.mark.parametrize("which", [0, 1])
def test_a_message_cut_anywhere_is_refused(store: Store, which: int, sixteenth: int) -> None:
    """E07: a truncated checkpoint led to a silent blank resume, or to a crash loop."""
    holder, key = at_a(store), store.keys.messages(T)
    whole = store.client.lindex(key, which)
    store.client.lset(key, which, whole[: len(whole) * sixteenth // 16])
    assert f"message {which}" in refused(store, holder)


@pytest.mark.parametrize("bad", [*PADDED.values(), b'{"role":"user","content":"x"}\x00\x00', b"\xff\xfe", b"[" * 9_999])
def test_a_message_that_is_no_message_is_refused(store: Store, bad: bytes) -> None:
    holder = at_a(store)
    store.client.lset(store.keys.messages(T), 1, bad)
    assert "message 1" in refused(store, holder)


@pytest.mark.parametrize(
    "bad",
    [
        {"role": "user"},
        {"role": "system", "content": "x"},
        {"role": "user", "content": ""},
        {"role": "user", "content": []},
        {"role": "user", "content": 5},
        {"role": "user", "content": {"type": "text"}},
        {"role": "user", "content": ["text"]},
        {"role": "user", "content": [None]},
        {"role": "assistant", "content": [{"text": "no type"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": 1, "name": "a", "input": {}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "a", "input": "{}"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "input": {}}]},
    ],
    ids=json.dumps,
)
def test_a_document_that_is_json_but_no_message_is_refused(store: Store, bad: dict[str, Any]) -> None:
    holder = begun(store)
    store.client.lset(store.keys.messages(T), 0, json.dumps(bad))
    assert "message 0 is not a message" in refused(store, holder)


def test_missing_and_surplus_messages_are_refused(store: Store) -> None:
    holder, key = at_a(store), store.keys.messages(T)
    last = store.client.rpop(key)
    assert "messageCount says 2, 1 messages are stored" in refused(store, holder)
    store.client.rpush(key, last, last)
    assert "messageCount says 2, 3 messages are stored" in refused(store, holder)


# -- keys that are gone or of another type ----------------------------------------------------------------------------


@pytest.mark.parametrize("state", [at_a, at_b])
def test_a_lost_checkpoint_is_no_fresh_start(store: Store, state: Callable[[Store], Holder]) -> None:
    """B15: resumed jobs began again from the first step, for ever."""
    holder = state(store)
    store.client.delete(store.keys.checkpoint(T), store.keys.messages(T))
    assert "checkpoint lost" in refused(store, holder)


@pytest.mark.parametrize("part", ["checkpoint", "messages"])
def test_half_a_checkpoint_is_refused(store: Store, part: str) -> None:
    holder = at_a(store)
    store.client.delete(getattr(store.keys, part)(T))
    assert "checkpoint" in refused(store, holder)


@pytest.mark.parametrize("raw", [None, b"", b"null", b"[]", b"{}", b"{", b"\x00", b"7", b"[" * 9_999])
def test_a_lost_request_is_not_made_up(store: Store, raw: bytes | None) -> None:
    holder = at_a(store)
    if raw is None:
        store.client.hdel(store.keys.task(T), "request")
    else:
        store.client.hset(store.keys.task(T), "request", raw)
    refused(store, holder)


@pytest.mark.parametrize("part", ["task", "checkpoint", "messages", "ledger", "started"])
def test_a_key_of_another_type_is_refused(store: Store, part: str) -> None:
    holder, key = recorded(store), getattr(store.keys, part)(T)
    kept = store.client.dump(key)
    store.client.delete(key)
    store.client.set(key, "something else")
    assert "WRONGTYPE" in refused(store, holder)
    store.client.restore(key, 0, kept, replace=True)


@pytest.mark.parametrize("bad", [b"", b"{", b"null", b"[]", b"{}", b"7", b'{"name":"append"}'])
@pytest.mark.parametrize("part", ["ledger", "started"])
def test_a_damaged_ledger_entry_or_marker_is_not_taken_for_a_missing_one(store: Store, part: str, bad: bytes) -> None:
    """Taken for missing, the call would run a second time."""
    holder = recorded(store)
    store.client.hset(getattr(store.keys, part)(T), f"{CALL.turn}:{CALL.id}", bad)
    assert "ledger or a start marker" in refused(store, holder)


@pytest.mark.parametrize(("name", "value"), [("status", "sleeping"), ("delivery", "x"), ("crashes", "1.5")])
def test_verbs_say_in_words_that_a_record_is_not_readable(store: Store, name: str, value: str) -> None:
    queued(store)
    good = store.client.hget(store.keys.task(T), name)
    store.client.hset(store.keys.task(T), name, value)
    with nothing_written(store.client):
        for verb in (lambda: store.claim(T, 1, {}), lambda: store.cancel(T, by="x"), lambda: store.retry(T, by="x")):
            with pytest.raises(BatonError, match="not readable"):
                verb()
    store.client.hset(store.keys.task(T), name, good or "0")


# -- controls ------------------------------------------------------------------------------------------------------


def test_control_what_was_written_is_read_back_equal(store: Store) -> None:
    holder = marked(store)
    fresh = Holder(T, holder.fence, 1, 1, store.clock, holder.lease_ttl_s, holder.margin_s)
    fresh.confirm(store.clock.monotonic())
    loaded = load_as(store, fresh)
    assert loaded.checkpoint is not None
    assert (loaded.checkpoint.messages, loaded.checkpoint.pending) == (AT_A.messages, AT_A.pending)
    assert (loaded.checkpoint.turns, loaded.checkpoint.tokens_used) == (1, {"input_tokens": 10})
    assert (loaded.calls.entries, list(loaded.calls.markers), loaded.markers_trusted) == ({}, [CALL.id], True)
    assert fresh.seq == holder.seq == 3


def test_control_a_task_that_has_not_begun_has_nothing_to_load(store: Store) -> None:
    loaded = load_as(store, claimed(store))
    assert (loaded.request, loaded.checkpoint) == (None, None)


def test_control_two_assistant_messages_in_a_row_are_sound(store: Store) -> None:
    """`pause_turn` leaves such a history behind."""
    holder = begun(store)
    store.client.rpush(store.keys.messages(T), *[json.dumps(said({"type": "text", "text": "t"}))] * 2)
    store.client.hset(store.keys.checkpoint(T), "messageCount", 3)
    assert load_as(store, holder).checkpoint is not None


def test_entries_of_other_turns_are_not_those_of_this_call(store: Store) -> None:
    """A07: models do use an id again; the turn is part of the ledger's field."""
    holder = marked(store)
    store.client.hset(store.keys.ledger(T), f"7:{CALL.id}", b"{broken")
    loaded = load_as(store, holder)
    assert loaded.calls.entries == {}


def test_a_missing_marker_proves_nothing_after_a_restart(store: Store) -> None:
    """Design 4.4: the server that holds point A is remembered; a new incarnation may have lost writes since."""
    holder = at_a(store)
    assert load_as(store, holder).markers_trusted
    store.probe.name = "another incarnation"  # type: ignore[attr-defined]  # a FixedProbe
    assert not load_as(store, holder).markers_trusted
    store.probe.durable = True  # type: ignore[attr-defined]
    assert load_as(store, holder).markers_trusted


def test_control_with_nothing_pending_there_is_nothing_to_prove(store: Store) -> None:
    holder = at_b(store)
    store.probe.name = "another incarnation"  # type: ignore[attr-defined]
    assert load_as(store, holder).markers_trusted
    assert AT_B.pending == ()


def test_one_damaged_task_does_not_touch_another(store: Store) -> None:
    at_a(store)
    store.client.hset(store.keys.checkpoint(T), "version", "?")
    store.create(new_task("t2"))
    lapse(store)
    assert store.recover(T, proof="p") is not None, "ownership does not depend on what the checkpoint holds"
