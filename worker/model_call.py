"""One call of the model: its tries, its waits, its deadline, and what counts as an answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anthropic
import httpx2
from anthropic.types import Message, RawMessageStreamEvent
from tenacity import RetryCallState, Retrying, retry_if_exception

from worker.clock import Clock
from worker.errors import ModelPermanent, ModelTransient
from worker.model_body import Bodies
from worker.model_client import CONNECT_TIMEOUT_S
from worker.model_faults import api_fault, resume_after_s, translate, words
from worker.model_stream import Accumulator, UnknownDelta, loads
from worker.settings import Settings

if TYPE_CHECKING:
    from anthropic._streaming import ServerSentEvent

SLEEP_SLICE_S = 0.5
FIRST_WAIT_S = 1.0
MESSAGES, STREAM = "/v1/messages", anthropic.Stream[RawMessageStreamEvent]
COUNTERS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


_bodies = Bodies()


@dataclass(frozen=True)
class Response:
    """One complete answer. `content` is exactly as received, unknown block types and fields included."""

    content: list[dict[str, Any]]
    stop_reason: str
    usage: dict[str, int]
    request_id: str | None
    tries: int
    stop_details: dict[str, Any] | None = None
    resume_after_s: float | None = None  # this answer used up a limit, which is free again then

    @property
    def total_tokens(self) -> int:
        return sum(self.usage.get(name, 0) for name in COUNTERS)

    @property
    def text(self) -> str:
        return "".join(block.get("text") or "" for block in self.content if block.get("type") == "text")


@dataclass
class Call:
    """One `respond`: its deadline, its number of requests, and whether streaming was given up for it."""

    settings: Settings
    clock: Clock
    request: dict[str, Any]
    messages: Any  # as stored; the SDK's own types do not know blocks of tomorrow
    watch: Callable[[], None]
    tries: int = 0
    whole: bool = False
    ends_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.ends_at = self.clock.monotonic() + self.settings.model_call_max_s

    def run(self, client: anthropic.Anthropic) -> Response:
        retrying = Retrying(
            retry=retry_if_exception(self._may_pass),
            wait=self._wait_s,
            stop=self._must_stop,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            return retrying(self._try_once, client)
        except ModelTransient as fault:
            tries = f" (after {self.tries} tries)" if self.tries > 1 else ""
            raise ModelTransient(
                f"{fault}{tries}",
                request_id=fault.request_id,
                retry_after_s=fault.retry_after_s,
                throttled=fault.throttled,
                said=fault.said,
            ) from None

    def beat(self) -> None:
        """Ask whether to go on: of the caller first, then of the clock."""
        self.watch()
        if self.clock.monotonic() >= self.ends_at:
            raise ModelTransient(
                f"The model call took longer than {self.settings.model_call_max_s:g} s (BATON_MODEL_CALL_MAX_S)."
            )

    def _try_once(self, client: anthropic.Anthropic) -> Response:
        try:
            if not self.whole:
                try:
                    return self._stream(client)
                except UnknownDelta:
                    self.whole = True
            return self._ask_whole(client)
        except BaseException as error:
            fault = translate(error)
            if fault is error:
                raise
            # `from None`: a chained httpx2 error may quote the key into a traceback.
            raise fault from None

    def _stream(self, client: anthropic.Anthropic) -> Response:
        self._count_try()
        body = _bodies.make(self.request, self.messages)
        with client.post(MESSAGES, content=body, cast_to=Message, stream=True, stream_cls=STREAM) as answer:
            http = answer.response
            if "text/event-stream" not in http.headers.get("content-type", ""):
                # Some gateways ignore `stream` and answer with the whole message.
                http.read()
                return self._accept(_json_of(http), http.headers)
            built = Accumulator()
            for event in anthropic.Stream.raw_events(http):
                self.beat()
                if event.data:
                    built.feed(self._checked(event, http.headers))
                # Not waiting for the end of the body: a whole message was paid for and is here.
                if built.finished:
                    break
            return self._accept(built.message(), http.headers)

    def _checked(self, event: ServerSentEvent, headers: httpx2.Headers) -> Any:
        try:
            data = loads(event.data)
        except ModelTransient:
            if event.event == "error":
                raise api_fault(200, None, headers) from None
            raise
        if event.event == "error" or (isinstance(data, dict) and data.get("type") == "error"):
            raise api_fault(200, data, headers)
        return data

    def _ask_whole(self, client: anthropic.Anthropic) -> Response:
        self._count_try()
        # Not one byte comes before the whole answer is there, so the silence allowed is the whole call.
        timeout = httpx2.Timeout(self.settings.model_call_max_s, connect=CONNECT_TIMEOUT_S)
        answer = client.messages.with_raw_response.create(**self.request, messages=self.messages, timeout=timeout)
        return self._accept(_json_of(answer.http_response), answer.headers)

    def _count_try(self) -> None:
        self.beat()
        self.tries += 1

    def _accept(self, message: dict[str, Any], headers: httpx2.Headers) -> Response:
        """Let nothing through but a whole message whose calls can be answered."""
        if message.get("type") == "error":
            raise api_fault(200, message, headers)
        content, stop_reason = message.get("content"), message.get("stop_reason")
        request_id = headers.get("request-id")
        whole = isinstance(content, list) and all(isinstance(block, dict) for block in content)
        if not whole or not isinstance(stop_reason, str):
            raise ModelTransient("The model's answer was not a whole message.", request_id=request_id)
        assert isinstance(content, list)
        if problem := _malformed(content, stop_reason):
            raise ModelPermanent(f"The model's answer is malformed: {problem}.", request_id=request_id)
        usage = message.get("usage")
        counts = usage if isinstance(usage, dict) else {}
        return Response(
            content=content,
            stop_reason=stop_reason,
            usage=dict.fromkeys(COUNTERS, 0) | {k: max(v, 0) for k, v in counts.items() if type(v) is int},
            request_id=request_id,
            tries=self.tries,
            stop_details=message.get("stop_details"),
            resume_after_s=resume_after_s(headers),
        )

    def _may_pass(self, error: BaseException) -> bool:
        # What was said to everybody is for the gate of them all (worker.throttle) to wait out, and for no worker.
        return isinstance(error, ModelTransient) and not error.throttled

    def _wait_s(self, state: RetryCallState) -> float:
        longest = self.settings.model_wait_max_s
        backoff = min(longest, FIRST_WAIT_S * 2 ** (state.attempt_number - 1)) * random.uniform(0.5, 1)
        asked = _asked_wait_s(state)
        if asked is None:
            return float(backoff)
        # Jitter on top of what was asked, or a whole fleet comes back in the same instant.
        return float(max(backoff, asked, min(longest, asked * random.uniform(1, 1.1))))

    def _must_stop(self, state: RetryCallState) -> bool:
        asked = _asked_wait_s(state)
        return (
            state.attempt_number >= self.settings.model_tries_max
            or (asked is not None and asked > self.settings.model_wait_max_s)
            or self.clock.monotonic() + state.upcoming_sleep >= self.ends_at
        )

    def _sleep(self, seconds: float) -> None:
        end = self.clock.monotonic() + seconds
        while (left := end - self.clock.monotonic()) > 0:
            self.beat()
            self.clock.sleep(min(SLEEP_SLICE_S, left))


def _asked_wait_s(state: RetryCallState) -> float | None:
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after_s if isinstance(error, ModelTransient) else None


def _json_of(http: httpx2.Response) -> dict[str, Any]:
    try:
        body = loads(http.text)
    except ModelTransient:
        body = None
    if isinstance(body, dict):
        return body
    kind = words(http.headers.get("content-type", "no content type"))
    raise ModelTransient(
        f"Something answered 200 with {kind} that is no message: a proxy or gateway is in the way.",
        request_id=http.headers.get("request-id"),
    )


def _malformed(content: list[dict[str, Any]], stop_reason: str) -> str | None:
    """What makes the calls of an answer impossible to answer, if anything."""
    calls = [block for block in content if block.get("type") == "tool_use"]
    for call in calls:
        named = all(isinstance(call.get(key), str) and call[key] for key in ("id", "name"))
        if not named or not isinstance(call.get("input"), dict):
            return "a tool_use block lacks an id, a name or an input object"
    if len({call["id"] for call in calls}) != len(calls):
        return "two tool_use blocks have the same id"
    if stop_reason == "tool_use" and not calls:
        return "it stopped for tool_use and calls no tool"
    return None
