"""The scripted model is the API in every test and drill: it must be as strict, and say the same twice."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from ops.scripted_model import ScriptedModel
from ops.transcript import check_log
from tests.support.model import HELLO, claude, go_on, request
from worker.errors import InvalidInput, ModelConfig, ModelPermanent, ModelTransient

HEADERS = {"authorization": "Bearer k", "anthropic-version": "2026-10-21"}


def post(url, body, headers=HEADERS, path="/v1/messages"):
    """(status, JSON) of a plain request, without the SDK."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url + path, data=data, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def body(*messages, **fields):
    return {"model": "m", "max_tokens": 1, "messages": list(messages), **fields}


def play(script, task="task", results=("out",)):
    """Run a whole conversation by hand; returns the model's messages."""
    messages = [{"role": "user", "content": task}]
    answers = []
    with ScriptedModel(script) as model, claude(model.url) as client:
        while True:
            answer = client.respond(request(), messages, watch=go_on)
            answers.append(answer)
            calls = [block for block in answer.content if block["type"] == "tool_use"]
            if not calls:
                return answers
            said = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": text}
                for call, text in zip(calls, results, strict=True)
            ]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": said}]


def test_turns_follow_from_the_conversation_and_end_by_themselves():
    first, second, last = play({"turns": [{"calls": [{"name": "a"}]}, {"text": "t", "calls": [{"name": "b"}]}]})
    assert (first.stop_reason, second.stop_reason, last.stop_reason) == ("tool_use", "tool_use", "end_turn")
    assert (second.text, last.text) == ("t", "done")


def test_a_restarted_server_says_the_same_so_that_a_resumed_task_hears_it():
    script = {"turns": [{"calls": [{"name": "a", "input": {"x": "{{ task }}"}}, {"name": "b", "id": "toolu_own"}]}]}
    once, again = play(script, results=("1", "2")), play(script, results=("1", "2"))
    assert [a.content for a in once] == [a.content for a in again]
    assert once[0].content[0]["id"].startswith("toolu_")
    assert once[0].content[1]["id"] == "toolu_own"
    assert play(script, "other task", results=("1", "2"))[0].content[0]["id"] != once[0].content[0]["id"]


def test_a_last_turn_can_repeat():
    with ScriptedModel({"turns": [{"text": "again", "repeat": True}]}) as model, claude(model.url) as client:
        messages = [*HELLO, {"role": "assistant", "content": "x"}, *HELLO, {"role": "assistant", "content": "y"}]
        assert client.respond(request(), messages, watch=go_on).text == "again"


def test_a_task_gets_the_first_script_that_matches_it():
    scripts = {"scripts": [{"match": "^mail", "turns": [{"text": "M"}]}, {"turns": [{"text": "any"}]}]}
    assert play(scripts, "mail Bob")[0].text == "M"
    assert play(scripts, "the\nmail")[0].text == "any"
    with pytest.raises(ModelPermanent, match="no script matches"):
        play({"scripts": [{"match": "nothing", "turns": [{}]}]})


def test_what_the_model_says_can_depend_on_what_it_was_told():
    turns = [
        {"calls": [{"name": "count", "input": {"task": "for {{ task }}", "turn": "{{ turn }}"}}]},
        {
            "calls": [
                {
                    "name": "save",
                    "input": {
                        "n": "{{ results.count | int + 1 }}",
                        "all": "{{ results_all }}",
                        "text": "{% if turn %}later{% endif %}",
                        "plain": "{ not } %} a template",
                    },
                }
            ]
        },
        {"text": "Saved {{ results.count }}."},
    ]
    first, second, third = play({"turns": turns}, "me", results=("41",))
    assert first.content[0]["input"] == {"task": "for me", "turn": 0}
    assert second.content[0]["input"] == {
        "n": 42,
        "all": [{"name": "count", "text": "41", "is_error": False}],
        "text": "later",
        "plain": "{ not } %} a template",
    }
    assert third.text == "Saved 41."


def test_data_is_never_taken_for_a_template_or_for_code():
    turns = [{"calls": [{"name": "read"}]}, {"text": "{{ results.read }}"}]
    assert play({"turns": turns}, results=("{{ 7 * 7 }} [1, 2]",))[1].text == "{{ 7 * 7 }} [1, 2]"
    native = [{"calls": [{"name": "read"}]}, {"calls": [{"name": "b", "input": {"x": "{{ results.read }}"}}]}]
    assert play({"turns": native}, results=("[1, 2]",))[1].content[0]["input"] == {"x": "[1, 2]"}


@pytest.mark.parametrize(
    "text",
    ["{{ results.never_ran }}", "{{ task.__class__.__mro__ }}", "{{ 1 / 0 }}", "{{ results_all | map('upper') }}"],
)
def test_a_template_that_cannot_be_filled_says_which_turn(text):
    with pytest.raises(ModelPermanent, match=r"scripted model: turns\.0: "):
        play({"turns": [{"text": text}]})


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ({}, "scripts"),
        ({"turns": []}, "turns"),
        ({"turns": [{"text": "a"}, {"txt": "b"}]}, r"scripts\.0\.turns\.1\.txt"),
        ({"turns": [{"text": "{{ oops"}]}, r"scripts\.0\.turns\.0: "),
        ({"turns": [{}, {"calls": [{"name": "a", "input": {"x": "{{ nope }}"}}]}]}, r"turns\.1: .*unknown name 'nope'"),
        ({"turns": [{"content": [], "text": "a"}]}, "content stands alone"),
        ({"turns": [{"content": [{"text": "a"}]}]}, "needs a type"),
        ({"turns": [{"calls": [{"name": "a", "input": {"x": float("nan")}}]}]}, r"turns\.0: is not JSON"),
        ({"turns": [{"repeat": True}, {}]}, "only the last turn"),
        ({"turns": [{"fault": {}}]}, "either a status or a kind"),
        ({"turns": [{"fault": {"kind": "explode"}}]}, r"turns\.0\.fault\.kind"),
        ({"scripts": [{"match": "(", "turns": [{}]}]}, "match"),
    ],
)
def test_a_script_that_cannot_be_played_is_refused_by_the_turn(script, word):
    with pytest.raises(InvalidInput, match=word):
        ScriptedModel(script)


def test_a_script_comes_from_a_file_and_keeps_its_big_integers(tmp_path):
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"turns": [{"calls": [{"name": "a", "input": {"n": 2**76}}]}]}))
    with ScriptedModel(path) as model:
        assert post(model.url, body(*HELLO))[1]["content"][0]["input"] == {"n": 2**76}
    with pytest.raises(InvalidInput, match="cannot be read"):
        ScriptedModel(tmp_path / "missing.json")
    path.write_text("{")
    with pytest.raises(InvalidInput, match="not JSON"):
        ScriptedModel(path)


def test_requests_are_refused_as_the_api_refuses_them():
    with ScriptedModel({"turns": [{"text": "a"}]}) as model:
        open_call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "t", "input": {}}]}
        status, answer = post(model.url, body(*HELLO, open_call))
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert "messages.1: `tool_use` ids were found without `tool_result` blocks" in answer["error"]["message"]
        assert post(model.url, body(*HELLO), {**HEADERS, "authorization": ""})[0] == 401
        assert post(model.url, body(*HELLO), {"authorization": "Bearer k"})[0] == 400
        assert post(model.url, b"{")[0] == 400
        assert post(model.url, b"[]")[0] == 400
        assert post(model.url, body(*HELLO), path="/v1/other")[0] == 404
        with pytest.raises(urllib.error.HTTPError, match="404") as caught:
            urllib.request.urlopen(model.url, timeout=10)
        caught.value.close()
        assert post(model.url, body(*HELLO))[0] == 200


def test_faults_are_used_up_per_conversation_and_turn_in_their_order():
    faults = [{"status": 529, "times": 2}, {"status": 429, "headers": {"retry-after": "9"}}, {"status": 418}]
    with ScriptedModel({"turns": [{"text": "a", "fault": {"status": 500}, "faults": faults}]}) as model:
        other = [{"role": "user", "content": "other"}]
        assert [post(model.url, body(*HELLO))[0] for _ in range(7)] == [500, 529, 529, 429, 418, 200, 200]
        assert post(model.url, body(*other))[0] == 500


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("early_end", json.JSONDecodeError),
        ("truncate", http.client.IncompleteRead),
        ("reset", ConnectionResetError),
        ("html", json.JSONDecodeError),
    ],
)
def test_transports_break_without_a_stream_too(kind, seen):
    with ScriptedModel({"turns": [{"fault": {"kind": kind}}]}) as model:
        with pytest.raises(seen):
            post(model.url, body(*HELLO))
        assert post(model.url, body(*HELLO))[0] == 200


def test_an_error_event_without_a_stream_is_a_status():
    fault = {"kind": "sse_error", "type": "overloaded_error", "message": "busy"}
    with ScriptedModel({"turns": [{"fault": fault}]}) as model:
        status, answer = post(model.url, body(*HELLO))
    assert (status, answer["error"]) == (529, {"type": "overloaded_error", "message": "busy"})


def test_a_gateways_error_page_has_a_status_of_its_own():
    script = {"turns": [{"fault": {"kind": "html", "status": 502, "times": 9}}]}
    with ScriptedModel(script) as model, claude(model.url) as client, pytest.raises(ModelTransient, match="502"):
        client.respond(request(), HELLO, watch=go_on)


def test_the_sdk_meets_a_missing_key_as_at_the_api():
    script = {"turns": [{"fault": {"status": 401}}]}
    refused = pytest.raises(ModelConfig, match="401 authentication_error")
    with ScriptedModel(script) as model, claude(model.url) as client, refused:
        client.respond(request(), HELLO, watch=go_on)


def test_every_request_is_logged_before_it_is_answered(tmp_path):
    log = tmp_path / "requests.jsonl"
    script = {"turns": [{"calls": [{"name": "a"}], "fault": {"status": 500}}, {"text": "b"}]}
    with ScriptedModel(script, log=log) as model, claude(model.url) as client:
        first = client.respond(request(), HELLO, watch=go_on)
        result = {"type": "tool_result", "tool_use_id": first.content[0]["id"], "content": "x"}
        grown = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        client.respond(request(), grown, watch=go_on)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [line["body"] for line in lines] == model.requests
    assert [(line["status"], line["fault"]) for line in lines] == [(500, "500"), (200, None), (200, None)]
    assert lines[0]["response"] is None
    assert lines[1]["response"]["content"] == first.content
    assert check_log(lines) == []


def test_a_client_that_disappears_makes_no_noise(capfd):
    with ScriptedModel({"turns": [{"text": "x" * 2_000_000, "delay_s": 0.1}]}) as model:
        data = json.dumps(body(*HELLO, stream=True)).encode()
        head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
        raw = f"POST /v1/messages HTTP/1.1\r\nhost: x\r\n{head}content-length: {len(data)}\r\n\r\n".encode() + data
        host, port = model.url.removeprefix("http://").split(":")
        for sent in (raw, raw[:40], raw[:-5], b""):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(sent)
        assert post(model.url, body(*HELLO))[0] == 200
    assert capfd.readouterr() == ("", "")


def test_stopping_cuts_what_hangs_and_leaves_no_thread():
    before = set(threading.enumerate())
    model = ScriptedModel({"turns": [{"fault": {"kind": "hang"}}]})
    with pytest.raises(RuntimeError, match="not started"):
        _ = model.url
    model.start()
    with socket.create_connection(model.url.removeprefix("http://").split(":")):
        model.stop()
    model.stop()
    assert {thread for thread in threading.enumerate() if thread.is_alive()} <= before


def test_the_double_does_not_import_anthropic():
    code = "import sys, ops.scripted_model; assert not {'anthropic', 'rq'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
