"""What is wrong with key or address is said before a request, in words; and a client is not shared over a fork."""

from __future__ import annotations

import subprocess
import sys

import httpx2
import pytest

from ops.scripted_model import ScriptedModel
from tests.support.model import HELLO, claude, go_on, message, request, settings
from worker import model_net
from worker.errors import ModelConfig
from worker.model import Claude

KEYS = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
NAMES = (*KEYS, "ANTHROPIC_BASE_URL", "ANTHROPIC_PROFILE", "ANTHROPIC_CONFIG_DIR", "XDG_CONFIG_HOME")
BAD_KEYS = ["   ", "sk-1\n", "sk-1 sk-2", " sk-1", "sk-é", "sk\t1"]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    # No profile of the person who runs the tests is to be found.
    monkeypatch.setenv("HOME", str(tmp_path))


def ask(**options):
    """One call over a transport that answers; returns the requests it saw."""
    seen = []

    def answers(http):
        seen.append(http)
        return httpx2.Response(200, json=message())

    with Claude(settings(), transport=httpx2.MockTransport(answers), **options) as client:
        client.respond(request(), HELLO, watch=go_on)
    return seen


def test_without_a_key_the_call_says_which_variable_to_set():
    with pytest.raises(ModelConfig, match="set ANTHROPIC_API_KEY"):
        ask()


@pytest.mark.parametrize(
    ("key", "place"),
    [("sk\x00", "argument"), *((key, place) for key in BAD_KEYS for place in ("argument", *KEYS))],
)
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(key, place, monkeypatch):
    options = {"api_key": key} if place == "argument" else {}
    if not options:
        monkeypatch.setenv(place, key)
    with pytest.raises(ModelConfig, match="key") as caught:
        ask(**options)
    assert key not in str(caught.value)


def test_credentials_that_cannot_be_read_are_said_before_a_request(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_PROFILE", "nobody")
    with pytest.raises(ModelConfig, match="nobody"):
        ask()


def test_an_empty_key_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "token")
    assert ask()[0].headers["authorization"] == "Bearer token"


def test_the_key_of_the_environment_is_sent_as_a_bearer_token(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-env")
    assert ask()[0].headers["authorization"] == "Bearer sk-env"


@pytest.mark.parametrize("url", ["", "  "])
def test_an_empty_base_url_counts_as_unset(url, monkeypatch):
    """The usual blank of a compose file; the SDK would fail as if the network were down."""
    monkeypatch.setenv("ANTHROPIC_BASE_URL", url)
    assert str(ask(api_key="k")[0].url) == "https://api.anthropic.com/v1/messages"


@pytest.mark.parametrize("url", ["gateway.example", "gateway:8080", "ftp://x", "http://", "https://x\n", "http://a b"])
@pytest.mark.parametrize("place", ["argument", "environment"])
def test_a_base_url_that_leads_nowhere_is_refused(url, place, monkeypatch):
    options = {"base_url": url} if place == "argument" else {}
    if not options:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", url)
    with pytest.raises(ModelConfig):
        ask(api_key="k", **options)


@pytest.mark.parametrize("url", ["https://gateway.example/v1", "https://u:password@gateway.example/claude/v1/"])
def test_a_base_url_that_ends_in_v1_is_refused_because_the_client_adds_it(url):
    with pytest.raises(ModelConfig, match="/v1") as caught:
        ask(api_key="k", base_url=url)
    assert "password" not in str(caught.value)


def test_a_base_url_with_a_path_is_kept():
    assert str(ask(api_key="k", base_url="https://g.example/claude")[0].url) == "https://g.example/claude/v1/messages"


def test_the_sdk_is_told_not_to_retry_and_not_to_wait_for_ever():
    headers = ask(api_key="k")[0].headers
    assert headers["x-stainless-retry-count"] == "0"
    assert float(headers["x-stainless-read-timeout"]) == 120


def test_the_http_client_lets_its_sockets_be_watched():
    """It hangs on where httpx2 keeps its pool: this test is the one to fail when that moves."""
    with httpx2.Client() as http:
        assert model_net.install(http)
    with httpx2.Client(transport=httpx2.MockTransport(lambda _: httpx2.Response(200))) as http:
        assert not model_net.install(http)


def test_a_child_makes_a_client_of_its_own():
    """Two processes on one kept-alive connection get each other's answers."""
    code = """
import os, sys
from tests.support.model import HELLO, claude, go_on, request
client = claude(sys.argv[1])
client.respond(request(), HELLO, watch=go_on)
mine = client._client
pid = os.fork()
if pid == 0:
    ok = client.respond(request(), HELLO, watch=go_on).text == "hi" and client._client is not mine
    os._exit(0 if ok else 1)
assert os.waitpid(pid, 0)[1] == 0
assert client.respond(request(), HELLO, watch=go_on).text == "hi" and client._client is mine
"""
    with ScriptedModel({"turns": [{"text": "hi"}]}) as model:
        subprocess.run([sys.executable, "-c", code, model.url], check=True, timeout=60)
        assert len(model.requests) == 3


def test_preload_pays_for_the_import_without_a_socket_or_a_key():
    code = """
import os, socket, sys
def refuse(*_): raise AssertionError("a socket was opened")
socket.socket.connect = refuse
os.environ.update(ANTHROPIC_API_KEY="broken key\\n", ANTHROPIC_BASE_URL="nowhere")
from worker.model import preload
preload()
assert "anthropic" in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_a_client_can_be_closed_twice_and_used_again():
    with ScriptedModel({"turns": [{"text": "hi"}]}) as model:
        client = claude(model.url)
        client.close()
        assert client.respond(request(), HELLO, watch=go_on).text == "hi"
        client.close()
        client.close()
