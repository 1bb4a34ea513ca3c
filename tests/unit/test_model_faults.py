"""Every way a call can fail becomes one of three answers: wait, tell a person, end the task; or is not ours."""

from __future__ import annotations

import json
import ssl
import traceback

import anthropic
import httpx2
import pytest

from tests.support.model import HELLO, events_of, go_on, message, mocked, request, stream
from worker.errors import CancelRequested, ModelConfig, ModelPermanent, ModelTransient
from worker.model import translate
from worker.model_faults import RETRY_AFTER_MAX_S, WORDS_MAX, api_fault, resume_after_s, retry_after_s, words

SECRET = "sk-ant-secret-000"


def error(kind: str, message: str = "words of the API", **details: object) -> dict:
    said = {"type": kind, "message": message} | ({"details": details} if details else {})
    return {"type": "error", "error": said}


STATUSES = [
    (400, error("invalid_request_error"), {}, ModelPermanent),
    (400, error("invalid_request_error", "prompt is too long: 9 tokens > 8 maximum"), {}, ModelPermanent),
    (400, error("invalid_request_error", "You have reached your specified API usage limits."), {}, ModelConfig),
    (400, error("invalid_request_error", error_code="request_body_timeout"), {}, ModelTransient),
    (400, error("invalid_request_error"), {"x-should-retry": "true"}, ModelTransient),
    (401, error("authentication_error"), {}, ModelConfig),
    (402, error("billing_error"), {}, ModelConfig),
    (403, error("permission_error"), {}, ModelConfig),
    (404, error("not_found_error", "model: claude-nope"), {}, ModelPermanent),
    (404, "<html>nginx</html>", {}, ModelConfig),
    (405, "no", {}, ModelConfig),
    (408, error("timeout_error"), {}, ModelTransient),
    (409, error("conflict_error"), {}, ModelTransient),
    (413, error("request_too_large"), {}, ModelPermanent),
    (413, "<html>nginx</html>", {}, ModelPermanent),
    (422, error("invalid_request_error"), {}, ModelPermanent),
    (424, "", {}, ModelPermanent),
    (429, error("rate_limit_error"), {}, ModelTransient),
    (429, error("rate_limit_error", error_code="enforced_spend_limit_reached"), {}, ModelConfig),
    (429, error("rate_limit_error", error_code="contract_spend_limit_reached"), {}, ModelConfig),
    (431, "", {}, ModelPermanent),
    (500, error("api_error"), {}, ModelTransient),
    (502, "<html>bad gateway</html>", {}, ModelTransient),
    (503, "", {}, ModelTransient),
    (504, error("timeout_error"), {}, ModelTransient),
    (529, error("overloaded_error"), {}, ModelTransient),
]


@pytest.mark.parametrize(
    ("status", "body", "headers", "expected"), STATUSES, ids=[f"{i:02d}-{s[0]}" for i, s in enumerate(STATUSES)]
)
def test_each_status_is_sorted_and_only_the_transient_is_asked_again(status, body, headers, expected):
    requests = []

    def answers(http):
        requests.append(http)
        text = body if isinstance(body, str) else json.dumps(body)
        return httpx2.Response(status, headers={"request-id": "req_7", **headers}, text=text)

    with mocked(answers, model_tries_max=3) as client, pytest.raises(expected) as caught:
        client.respond(request(), HELLO, watch=go_on)
    assert type(caught.value) is expected
    to_everybody = status in (429, 529) and expected is ModelTransient  # waited out by the gate of all tasks
    assert len(requests) == (3 if expected is ModelTransient and not to_everybody else 1)
    assert getattr(caught.value, "throttled", False) == to_everybody
    assert caught.value.request_id == "req_7"
    assert str(status) in str(caught.value)
    assert "req_7" in str(caught.value)
    if isinstance(body, dict):
        assert body["error"]["type"] in str(caught.value)
        assert body["error"]["message"] in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("overloaded_error", ModelTransient),
        ("api_error", ModelTransient),
        ("timeout_error", ModelTransient),
        ("rate_limit_error", ModelTransient),
        ("unheard_of_error", ModelTransient),
        ("invalid_request_error", ModelPermanent),
        ("authentication_error", ModelConfig),
        ("billing_error", ModelConfig),
    ],
)
def test_an_error_event_in_a_stream_is_sorted_by_its_type_because_its_status_was_200(kind, expected):
    start = {"type": "message_start", "message": message(content=[], stop_reason=None)}
    with mocked(lambda _: stream(start, error(kind))) as client, pytest.raises(expected, match=kind) as caught:
        client.respond(request(), HELLO, watch=go_on)
    assert type(caught.value) is expected
    assert caught.value.request_id == "req_s"


WHOLE = list(events_of({"type": "text", "text": ""}, deltas={}, stop="end_turn"))
JSON = {"content-type": "application/json"}
SSE = {"content-type": "text/event-stream"}


@pytest.mark.parametrize(
    "answer",
    [
        lambda: httpx2.Response(200, headers={"content-type": "text/html"}, text="<html>login</html>"),
        lambda: httpx2.Response(200, headers=JSON, text='{"type": "mess'),
        lambda: httpx2.Response(200, headers=JSON, text="[]"),
        lambda: httpx2.Response(200, headers=JSON, text="{}"),
        lambda: httpx2.Response(200, json=message(stop_reason=None)),
        lambda: httpx2.Response(200, json=message(content="text")),
        lambda: httpx2.Response(200, json=error("api_error")),
        lambda: httpx2.Response(200, headers=SSE, text=""),
        lambda: httpx2.Response(200, headers=SSE, text="event: message_start\ndata: {\n\n"),
        lambda: httpx2.Response(200, headers=SSE, text="event: error\ndata: oops\n\n"),
        lambda: httpx2.Response(200, headers=SSE, content=b"data: \xff\xfe\n\n"),
        lambda: stream(*WHOLE[:-1]),
        lambda: stream(*WHOLE[:-2]),
        lambda: stream(*WHOLE[:2]),
        lambda: stream(*WHOLE[1:]),
        lambda: stream(WHOLE[0], {"type": "content_block_delta", "index": 5, "delta": {"type": "text_delta"}}),
        lambda: stream(WHOLE[0], {"no": "type"}),
        lambda: httpx2.Response(200, text=json.dumps(message()).replace("3", "9" * 5000), headers=JSON),
        lambda: httpx2.Response(200, text=json.dumps(message()).replace("3", "NaN"), headers=JSON),
    ],
    ids=[
        *("html", "cut-json", "list", "empty-object", "no-stop-reason", "no-content", "error-object"),
        *("empty-stream", "cut-event", "error-not-json", "not-utf8", "no-message-stop", "no-message-delta"),
        *("after-block-start", "no-message-start", "delta-without-block", "event-without-type"),
        *("number-too-long", "nan"),
    ],
)
def test_whatever_is_not_a_whole_message_is_asked_for_again(answer):
    requests = []

    def answers(http):
        requests.append(http)
        return answer()

    with mocked(answers, model_tries_max=2) as client, pytest.raises(ModelTransient):
        client.respond(request(), HELLO, watch=go_on)
    assert len(requests) == 2


REQUEST = httpx2.Request("POST", "http://x")


def _certificate_failure():
    failure = httpx2.ConnectError("certificate verify failed")
    failure.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
    return failure


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (httpx2.ConnectError("[Errno 111] Connection refused"), ModelTransient),
        (httpx2.ConnectTimeout("slow"), ModelTransient),
        (httpx2.ReadTimeout("silent"), ModelTransient),
        (httpx2.ReadError("reset"), ModelTransient),
        (httpx2.RemoteProtocolError("peer closed"), ModelTransient),
        (httpx2.PoolTimeout("full"), ModelTransient),
        (httpx2.ProxyError("502 Bad Gateway"), ModelTransient),
        (httpx2.ProxyError("407 Proxy Authentication Required"), ModelConfig),
        (httpx2.LocalProtocolError(f"Illegal header value b'Bearer {SECRET}\\n'"), ModelConfig),
        (httpx2.UnsupportedProtocol("no scheme"), ModelConfig),
        (httpx2.TooManyRedirects("loop"), ModelConfig),
        (_certificate_failure(), ModelConfig),
        (ConnectionResetError(104, "reset"), ModelTransient),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("when", ["while-sending", "in-the-stream"])
def test_a_broken_transport_is_sorted_whether_the_sdk_wrapped_it_or_not(raised, expected, when):
    class Breaks(httpx2.SyncByteStream):
        def __iter__(self):
            yield stream(WHOLE[0]).content
            raise raised

    def answers(_):
        if when == "while-sending":
            raise raised
        return httpx2.Response(200, headers=SSE, stream=Breaks())

    with mocked(answers, model_tries_max=1) as client, pytest.raises(expected) as caught:
        client.respond(request(), HELLO, watch=go_on)
    assert type(caught.value) is expected
    assert SECRET not in "".join(traceback.format_exception(caught.value))


class JobTimeout(Exception):
    """As RQ's: an ordinary Exception raised by a signal handler, whatever code is running."""


@pytest.mark.parametrize("when", ["while-sending", "in-the-stream"])
def test_an_exception_that_is_not_about_the_model_comes_out_as_itself_at_once(when):
    """The SDK makes an APIConnectionError of RQ's job timeout and, by default, tries again."""
    requests = []

    class Times(httpx2.SyncByteStream):
        def __iter__(self):
            yield stream(WHOLE[0]).content
            raise JobTimeout

    def answers(http):
        requests.append(http)
        if when == "while-sending":
            raise JobTimeout
        return httpx2.Response(200, headers=SSE, stream=Times())

    with mocked(answers) as client, pytest.raises(JobTimeout):
        client.respond(request(), HELLO, watch=go_on)
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("content", "word"),
    [("half \ud83d", "surrogate"), (float("nan"), "JSON"), (b"bytes", "JSON")],
    ids=["lone-surrogate", "nan", "bytes"],
)
def test_a_conversation_that_cannot_be_sent_ends_the_task_in_words(content, word):
    messages = [{"role": "user", "content": [{"type": "text", "text": "secret prompt", "x": content}]}]
    client = mocked(lambda _: pytest.fail("nothing may be sent"))
    with client, pytest.raises(ModelPermanent, match=word) as caught:
        client.respond(request(), messages, watch=go_on)
    assert "secret prompt" not in str(caught.value)


def test_a_conversation_that_does_not_fit_says_so():
    fault = api_fault(400, error("invalid_request_error", "prompt is too long: 9 > 8"), {})
    assert "no longer fits" in str(fault)


def test_control_flow_and_our_own_errors_are_left_alone():
    for ours in (CancelRequested(), KeyboardInterrupt(), ModelConfig("x"), LookupError("a bug")):
        assert translate(ours) is ours


def test_the_sdks_own_errors_without_a_status_are_sorted_too():
    assert type(translate(anthropic.APIConnectionError(request=REQUEST))) is ModelTransient
    response = httpx2.Response(200, request=REQUEST)
    assert type(translate(anthropic.APIResponseValidationError(response, None))) is ModelTransient
    assert type(translate(anthropic.AnthropicError("no profile"))) is ModelConfig
    assert type(translate(AssertionError())) is ModelTransient
    assert type(translate(TypeError("Could not resolve authentication method"))) is ModelConfig


def test_the_apis_words_are_capped_one_line_and_without_a_key():
    said = words(f"bad\x1b[31m key {SECRET} (Bearer abc.def)\n" + "x" * 1000)
    assert SECRET not in said
    assert "abc.def" not in said
    assert len(said) == WORDS_MAX
    assert said.isprintable()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-3"}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "3600"}, 3600),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:30 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 30),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
    ],
)
def test_retry_after_is_read_in_all_its_forms(headers, expected):
    assert retry_after_s(headers) == expected


def test_a_limit_that_is_used_up_is_read_from_the_headers_of_an_answer():
    date = {"date": "Wed, 21 Oct 2026 07:28:00 GMT"}

    def limit(name, left, reset):
        return {f"anthropic-ratelimit-{name}-remaining": left, f"anthropic-ratelimit-{name}-reset": reset}

    used, later = limit("requests", "0", "2026-10-21T07:28:05Z"), limit("output-tokens", "0", "2026-10-21T07:28:09Z")
    assert resume_after_s(date | used) == 5
    assert resume_after_s(date | used | later) == 9
    for free in ({}, limit("requests", "1", "2026-10-21T07:28:05Z"), limit("tokens", "0", "2026-10-21T07:27:00Z"),
                 limit("tokens", "0", "soon"), limit("tokens", "", "2026-10-21T07:28:05Z")):  # fmt: skip
        assert resume_after_s(date | free) is None
    assert api_fault(429, error("rate_limit_error"), date | used).retry_after_s == 5, "it names no other time"


@pytest.mark.parametrize("value", ["1e300", "864000000"])
def test_no_retry_after_is_longer_than_a_month(value):
    """1e306 seconds overflowed where the task was parked, which counted as a crash."""
    assert retry_after_s({"retry-after": value}) == RETRY_AFTER_MAX_S
    assert retry_after_s({"retry-after": "864000"}) == 864_000, "control"
