"""What the model said arrives as it was said, and nothing but whole, answerable messages arrives."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest

from ops.scripted_model import ScriptedModel
from tests.support.model import HELLO, claude, events_of, go_on, message, mocked, request, stream
from worker.errors import ModelPermanent, ModelTransient
from worker.model_faults import api_fault

BLOCKS = json.loads((Path(__file__).parents[1] / "data" / "content_blocks.json").read_text(encoding="utf-8"))
BIG = 2**76 + 1
CALL = {"type": "tool_use", "id": "toolu_1", "name": "run", "input": {}}


def named(block):
    return f"{BLOCKS.index(block):02d}-{block['type']}"


@pytest.mark.parametrize("block", BLOCKS, ids=named)
def test_every_kind_of_block_survives_a_stream_key_for_key_and_in_order(block):
    """None is lost, beta-only and unheard-of ones included: events are taken raw, not through SDK types."""
    turn = {"content": [block], "stop_reason": "end_turn"}
    with ScriptedModel({"turns": [turn]}) as model, claude(model.url) as client:
        answer = client.respond(request(), HELLO, watch=go_on)
    assert json.dumps(answer.content) == json.dumps([block])


def test_every_kind_of_block_survives_json_and_goes_back_unchanged():
    """The first request meets a delta nobody knows, so the whole answer is fetched as JSON (BLOCKS in one)."""
    sent = []

    def answers(http):
        sent.append(json.loads(http.content))
        if sent[-1].get("stream"):
            return stream(*events_of(BLOCKS[3], deltas={0: [{"type": "new_delta", "x": 1}]}, stop="end_turn"))
        return httpx2.Response(200, text=json.dumps(message(content=BLOCKS)))

    with mocked(answers) as client:
        answer = client.respond(request(), HELLO, watch=go_on)
        assert json.dumps(answer.content) == json.dumps(BLOCKS)
        assert answer.tries == 2
        assert [body.get("stream", False) for body in sent] == [True, False]
        client.respond(request(), [*HELLO, {"role": "assistant", "content": answer.content}], watch=go_on)
    assert json.dumps(sent[-1]["messages"][1]["content"]) == json.dumps(BLOCKS)


def test_deltas_that_only_the_beta_api_knows_are_applied():
    block = {"type": "compaction", "content": None}
    deltas = {0: [{"type": "compaction_delta", "content": "sum", "encrypted_content": "e"}]}
    with mocked(lambda _: stream(*events_of(block, deltas=deltas, stop="end_turn"))) as client:
        answer = client.respond(request(), HELLO, watch=go_on)
    assert answer.content == [{"type": "compaction", "content": "sum", "encrypted_content": "e"}]


def test_a_77_bit_integer_stays_an_integer_through_the_stream():
    turn = {"calls": [{"name": "echo", "input": {"n": BIG}}]}
    with ScriptedModel({"turns": [turn]}) as model, claude(model.url) as client:
        answer = client.respond(request(), HELLO, watch=go_on)
    assert answer.content[0]["input"] == {"n": BIG}
    assert type(answer.content[0]["input"]["n"]) is int


def test_a_lone_surrogate_is_handed_on_as_it_came():
    with ScriptedModel({"turns": [{"text": "half \ud83d pair"}]}) as model, claude(model.url) as client:
        assert client.respond(request(), HELLO, watch=go_on).text == "half \ud83d pair"


@pytest.mark.parametrize(
    "reason",
    ["end_turn", "max_tokens", "stop_sequence", "pause_turn", "refusal", "model_context_window_exceeded", "new"],
)
def test_stop_reasons_pass_through_known_or_not(reason):
    details = {"type": "refusal", "category": "bio", "explanation": "no"}
    turn = {"content": [], "stop_reason": reason, "stop_details": details}
    with ScriptedModel({"turns": [turn]}) as model, claude(model.url) as client:
        answer = client.respond(request(), HELLO, watch=go_on)
    assert (answer.stop_reason, answer.content, answer.stop_details) == (reason, [], details)


def test_usage_is_flat_integers_and_their_total():
    usage = {
        "input_tokens": 1,
        "cache_creation_input_tokens": 2,
        "cache_read_input_tokens": 4,
        "output_tokens": 8,
        "new_counter": 16,
        "service_tier": "standard",
        "cache_creation": {"ephemeral_5m_input_tokens": 2},
        "nothing": None,
    }
    with ScriptedModel({"turns": [{"text": "a", "usage": usage}]}) as model, claude(model.url) as client:
        answer = client.respond(request(), HELLO, watch=go_on)
    assert answer.total_tokens == 15
    assert answer.usage["new_counter"] == 16
    assert all(type(count) is int for count in answer.usage.values())
    assert answer.request_id == "req_000001"


def test_a_longest_answer_of_64000_tokens_is_asked_for():
    """The SDK refuses such a request in its non-streaming form, before sending it (G11)."""
    with ScriptedModel({"turns": [{"text": "a"}]}) as model, claude(model.url) as client:
        client.respond(request(max_tokens=64_000), HELLO, watch=go_on)
        assert model.requests[0]["max_tokens"] == 64_000


def test_a_gateway_that_ignores_stream_is_understood():
    with mocked(lambda _: httpx2.Response(200, json=message())) as client:
        assert client.respond(request(), HELLO, watch=go_on).text == "hi"


def test_events_without_a_name_line_are_understood():
    """The SDK's own stream ignores all of them."""
    events = events_of(
        {"type": "text", "text": ""}, deltas={0: [{"type": "text_delta", "text": "hi"}]}, stop="end_turn"
    )
    with mocked(lambda _: stream(*events, names=False)) as client:
        answer = client.respond(request(), HELLO, watch=go_on)
    assert (answer.text, answer.usage["input_tokens"], answer.usage["output_tokens"]) == ("hi", 3, 9)


def test_a_message_is_taken_when_it_is_whole_even_if_the_stream_stays_open():
    """It is paid for: a connection that breaks after message_stop must not cost it."""

    class Cut(httpx2.SyncByteStream):
        def __iter__(self):
            yield stream(*events_of({"type": "text", "text": "x"}, deltas={}, stop="end_turn")).content
            raise httpx2.ReadError("gone")

    def answers(_):
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Cut())

    with mocked(answers, model_tries_max=1) as client:
        assert client.respond(request(), HELLO, watch=go_on).text == "x"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"content": [CALL, CALL]}, "same id"),
        ({"content": [{"type": "text", "text": "x"}]}, "calls no tool"),
        ({"content": [{**CALL, "input": [1]}]}, "input"),
        ({"content": [{**CALL, "id": None}]}, "id"),
    ],
    ids=["same-id-twice", "no-call", "input-not-an-object", "no-id"],
)
def test_calls_that_cannot_be_answered_end_the_task(fields, word):
    calls = []

    def answers(http):
        calls.append(http)
        return httpx2.Response(200, json=message(stop_reason="tool_use", **fields))

    with mocked(answers) as client, pytest.raises(ModelPermanent, match=word):
        client.respond(request(), HELLO, watch=go_on)
    assert len(calls) == 1


def _input_cut_off(stop):
    deltas = {0: [{"type": "input_json_delta", "partial_json": '{"path": "/etc/pas'}]}
    return stream(*events_of(CALL, deltas=deltas, stop=stop))


def test_a_call_cut_off_by_max_tokens_keeps_its_empty_input():
    with mocked(lambda _: _input_cut_off("max_tokens")) as client:
        answer = client.respond(request(), HELLO, watch=go_on)
    assert (answer.stop_reason, answer.content[0]["input"]) == ("max_tokens", {})


def test_a_call_whose_input_is_not_json_is_asked_for_again():
    client = mocked(lambda _: _input_cut_off("tool_use"), model_tries_max=2)
    with client, pytest.raises(ModelTransient, match=r"not valid JSON.*2 tries"):
        client.respond(request(), HELLO, watch=go_on)


@pytest.mark.parametrize("odd", [[], {}, 7], ids=str)
def test_an_error_whose_type_is_no_text_may_pass_like_any_unknown_one(odd):
    """Out of a gateway; a set cannot be asked for a list, which was a crash of the worker."""
    fault = api_fault(200, {"error": {"type": odd, "message": "no", "details": {"error_code": odd}}}, {})
    assert isinstance(fault, ModelTransient)
    assert not fault.throttled
