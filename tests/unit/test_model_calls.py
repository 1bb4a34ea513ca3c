"""How often, how long, and when to stop: the one owner of retries."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx2
import pytest

from ops.scripted_model import ScriptedModel
from tests.support.model import HELLO, RecordingClock, claude, events_of, go_on, message, mocked, request, stream
from tests.support.waiting import wait_until
from worker.errors import CancelRequested, LeaseLost, ModelPermanent, ModelTransient
from worker.model import Claude

BROKEN = {"status": 500, "type": "api_error", "message": "Internal"}


def scripted(*faults, **turn):
    return ScriptedModel({"turns": [{"text": "made it", "faults": list(faults), **turn}]})


def test_a_fault_that_passes_is_waited_out_and_the_waits_grow():
    clock = RecordingClock()
    with scripted({**BROKEN, "times": 3}) as model, claude(model.url, clock) as client:
        answer = client.respond(request(), HELLO, watch=go_on)
        assert (answer.text, answer.tries, len(model.requests)) == ("made it", 4, 4)
    assert 0.5 + 1 + 2 <= sum(clock.slept) <= 1 + 2 + 4
    assert max(clock.slept) <= 0.5


def test_a_fault_that_stays_is_given_back_to_be_parked_after_the_documented_tries():
    with scripted({**BROKEN, "times": 99}) as model, claude(model.url) as client:
        with pytest.raises(ModelTransient, match=r"500 api_error: Internal .*after 4 tries") as caught:
            client.respond(request(), HELLO, watch=go_on)
        assert len(model.requests) == 4
    assert not caught.value.throttled


@pytest.mark.parametrize(
    ("fault", "said", "asked_s"),
    [
        ({"status": 429, "headers": {"retry-after": "3"}}, "429", 3),
        ({"status": 529, "message": "Overloaded"}, "529", None),
        ({"kind": "sse_error"}, "overloaded_error", None),
        ({"kind": "sse_error", "type": "rate_limit_error"}, "rate_limit_error", None),
    ],
    ids=["429", "529", "overloaded-in-the-stream", "limit-in-the-stream"],
)
def test_what_the_api_says_to_everybody_is_given_back_at_once_and_tried_by_nobody(fault, said, asked_s):
    """Each of a hundred tasks that tries on its own makes it worse for the others."""
    clock = RecordingClock()
    with scripted({**fault, "times": 9}) as model, claude(model.url, clock) as client:
        with pytest.raises(ModelTransient) as caught:
            client.respond(request(), HELLO, watch=go_on)
        assert len(model.requests) == 1
    assert (caught.value.throttled, caught.value.said, caught.value.retry_after_s) == (True, said, asked_s)
    assert clock.slept == []


@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        *(("hang", None), ("hang", 3), ("reset", None), ("reset", 3), ("truncate", None)),
        *(("early_end", None), ("html", None)),
    ],
)
def test_each_kind_of_broken_transport_is_tried_as_often_as_documented(kind, stop):
    """G03: two owners of retries multiply, and a call that timed out may still be paid for."""
    fault = {"kind": kind, "times": 99} | ({"after_events": stop} if stop else {})
    with scripted(fault) as model, claude(model.url, model_read_timeout_s=0.15, model_tries_max=2) as client:
        with pytest.raises(ModelTransient, match="after 2 tries"):
            client.respond(request(), HELLO, watch=go_on)
        assert len(model.requests) == 2


@pytest.mark.parametrize("kind", ["hang", "reset", "truncate", "early_end", "html"])
def test_each_kind_of_broken_transport_is_survived(kind):
    with scripted({"kind": kind}) as model, claude(model.url, model_read_timeout_s=0.15) as client:
        assert client.respond(request(), HELLO, watch=go_on).tries == 2


def test_a_refused_request_is_sent_once():
    with scripted({"status": 400, "message": "prompt is too long"}) as model, claude(model.url) as client:
        with pytest.raises(ModelPermanent):
            client.respond(request(), HELLO, watch=go_on)
        assert len(model.requests) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"retry-after": "20"},
        {"retry-after-ms": "20000"},
        {"retry-after": "Wed, 21 Oct 2026 07:28:20 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"},
    ],
    ids=["seconds", "milliseconds", "date"],
)
def test_a_wait_the_api_asks_for_is_kept(headers):
    clock = RecordingClock()
    answers = [httpx2.Response(503, headers=headers), httpx2.Response(200, json=message())]
    client = mocked(lambda _: answers.pop(0))
    client._clock = clock
    with client:
        assert client.respond(request(), HELLO, watch=go_on).tries == 2
    assert 20 <= sum(clock.slept) <= 22.1


def test_a_wait_too_long_to_hold_a_task_through_is_handed_to_the_caller_at_once():
    clock = RecordingClock()
    headers = {"retry-after": "3600"}
    with scripted({"status": 503, "headers": headers, "times": 9}) as model, claude(model.url, clock) as client:
        with pytest.raises(ModelTransient) as caught:
            client.respond(request(), HELLO, watch=go_on)
        assert len(model.requests) == 1
    assert caught.value.retry_after_s == 3600
    assert clock.slept == []


def test_no_wait_at_all_is_a_setting_too():
    clock = RecordingClock()
    with scripted({**BROKEN, "times": 3}) as model, claude(model.url, clock, model_wait_max_s=0) as client:
        assert client.respond(request(), HELLO, watch=go_on).tries == 4
    assert clock.slept == []


def test_a_call_has_a_deadline_that_waiting_does_not_cross():
    clock = RecordingClock()
    with scripted({**BROKEN, "times": 99}) as model:
        client = claude(model.url, clock, model_tries_max=20, model_call_max_s=10)
        with client, pytest.raises(ModelTransient):
            client.respond(request(), HELLO, watch=go_on)
        assert 2 <= len(model.requests) <= 6
    assert sum(clock.slept) < 10


def test_a_stream_that_drips_for_ever_ends_at_the_deadline():
    """Each read is quick enough; only the whole is too long."""
    clock = RecordingClock()

    class Drips(httpx2.SyncByteStream):
        def __iter__(self):
            while True:
                clock.advance(60)
                yield b'event: ping\ndata: {"type": "ping"}\n\n'

    client = mocked(lambda _: httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Drips()))
    client._clock = clock
    with client, pytest.raises(ModelTransient, match="BATON_MODEL_CALL_MAX_S"):
        client.respond(request(), HELLO, watch=go_on)


class Watch:
    """Raises at its n-th call."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.at, self.calls = error, at, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error


@pytest.mark.parametrize("error", [LeaseLost(), CancelRequested()], ids=["lease-lost", "cancel"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_watch_abandons_the_call_before_a_try_and_in_the_middle_of_a_stream(error, at):
    closed, sent = [], []

    class Body(httpx2.SyncByteStream):
        def __iter__(self):
            for event in events_of({"type": "text", "text": "x"}, deltas={}, stop="end_turn"):
                yield stream(event).content

        def close(self):
            closed.append(True)

    def answers(http):
        sent.append(http)
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Body())

    with mocked(answers) as client, pytest.raises(type(error)) as caught:
        client.respond(request(), HELLO, watch=Watch(error, at))
    assert caught.value is error
    assert len(sent) == (0 if at == 1 else 1)
    assert bool(closed) == (at > 1)


def test_watch_is_asked_at_every_event_pings_included():
    events = list(events_of({"type": "text", "text": "x"}, deltas={}, stop="end_turn"))
    watch = Watch(LeaseLost(), at=10**9)
    with mocked(lambda _: stream(events[0], {"type": "ping"}, {"type": "ping"}, *events[1:])) as client:
        client.respond(request(), HELLO, watch=watch)
    assert watch.calls == 1 + len(events) + 2


def test_watch_abandons_a_wait_within_half_a_second():
    clock = RecordingClock()
    watch = Watch(CancelRequested(), at=4)  # before the try, then every half second of the wait
    with scripted({"status": 503, "headers": {"retry-after": "30"}}) as model, claude(model.url, clock) as client:
        with pytest.raises(CancelRequested):
            client.respond(request(), HELLO, watch=watch)
        assert len(model.requests) == 1
    assert clock.slept == [0.5, 0.5]


@pytest.mark.parametrize("after_events", [0, 3], ids=["before-the-answer", "mid-stream"])
def test_watch_abandons_a_server_that_went_silent_long_before_the_read_timeout(after_events):
    """A cancel or a drain must not wait two minutes for a hung gateway; nor must the gateway keep the connection."""
    with scripted({"kind": "hang", "after_events": after_events}) as model, claude(model.url) as client:

        def watch():
            if model.requests:
                raise CancelRequested

        began = time.monotonic()
        with pytest.raises(CancelRequested):
            client.respond(request(), HELLO, watch=watch)
        assert time.monotonic() - began < 10
        assert model._server is not None
        wait_until(lambda: not model._server._open, "the server to see its client gone")


def test_the_deadline_holds_against_a_silent_server_too():
    with scripted({"kind": "hang"}) as model:
        client = Claude(claude("x", model_call_max_s=0.7)._settings, api_key="k", base_url=model.url)
        with client, pytest.raises(ModelTransient, match="BATON_MODEL_CALL_MAX_S"):
            client.respond(request(), HELLO, watch=go_on)
        assert len(model.requests) == 1


def test_a_signal_that_raises_an_ordinary_exception_ends_the_call():
    """How RQ ends a job that took too long. The SDK swallows it and asks again if left to itself."""

    class JobTimeout(Exception):
        pass

    def too_long(_number, _frame):
        raise JobTimeout

    before = signal.signal(signal.SIGUSR1, too_long)
    try:
        with scripted({"kind": "hang", "times": 9}) as model, claude(model.url) as client:

            def alarm():
                wait_until(lambda: model.requests, "the request")
                os.kill(os.getpid(), signal.SIGUSR1)

            thread = threading.Thread(target=alarm)
            thread.start()
            with pytest.raises(JobTimeout):
                client.respond(request(), HELLO, watch=go_on)
            thread.join()
            assert len(model.requests) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
