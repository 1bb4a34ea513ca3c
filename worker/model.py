"""Asking Claude, durably: one owner of retries, nothing accepted but a whole message, abandoned on request.

The only module (with its `model_*` helpers) that imports anthropic, which costs a second of CPU: import it
late, in the process that calls the model, or in a worker's parent through `preload()` before it forks.

The SDK's own retries are off: it retries RQ's job timeout away and obeys a `retry-after` of an hour while
the task's lease is held. Its stream helper is not used either: the raw events are taken (see model_call, model_stream),
so that a block reaches the checkpoint exactly as it was sent. Requests per call: at most `model_tries_max`,
plus one if a stream brings a kind of delta that only the non-streaming form can carry.
"""

from __future__ import annotations

import gc
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import anthropic
import httpx2

from worker import model_net
from worker.clock import Clock, SystemClock
from worker.errors import ModelConfig
from worker.model_call import Call, Response
from worker.model_client import make_client
from worker.model_faults import translate, words
from worker.settings import Settings, load_settings
from worker.state.throttle import Endpoint

__all__ = ["Claude", "Model", "Response", "preload", "translate"]


class Model(Protocol):
    """Something that answers a conversation."""

    def respond(
        self, request: dict[str, Any], messages: Sequence[dict[str, Any]], *, watch: Callable[[], None]
    ) -> Response:
        """One answer to `messages`; `request` is the task's frozen prefix (worker.request.build_request).

        `watch` is called before each try, at every stream event and at least every half second of waiting;
        what it raises abandons the call, closes the stream and passes through. Raises ModelTransient
        (ask again later), ModelConfig or ModelPermanent.
        """
        ...


class Claude(Model):
    """The Messages API. The client is made in the process that uses it, and again after a fork; threads share it."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock | None = None,
        api_key: str | None = None,
        base_url: str | None = None,
        *,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._api_key = api_key
        self._base_url = base_url
        self._transport = transport
        self._client: anthropic.Anthropic | None = None
        self._client_pid = 0
        self._connecting = threading.Lock()

    def respond(
        self, request: dict[str, Any], messages: Sequence[dict[str, Any]], *, watch: Callable[[], None]
    ) -> Response:
        call = Call(self._settings, self._clock, request, list(messages), watch)
        client = self._connected()
        token = model_net.watching.set(call.beat)
        try:
            return call.run(client)
        finally:
            model_net.watching.reset(token)

    def endpoint(self, request: dict[str, Any]) -> Endpoint:
        """What this request shares its rate limits with: base URL, key and model. Raises ModelConfig."""
        client, model = self._connected(), str(request["model"])
        # A key set by ANTHROPIC_CUSTOM_HEADERS stands in the headers, too. So do versions, which must not count:
        # workers in the middle of a deploy still share the limit.
        headers = {name.lower(): str(value) for name, value in client.default_headers.items()}
        keys = [headers.get(name, "") for name in ("authorization", "x-api-key")]
        digest = hashlib.sha256("\n".join([str(client.base_url), *keys, model]).encode()).hexdigest()[:16]
        return Endpoint(digest, client.base_url.host, words(model))

    def close(self) -> None:
        """Close idle connections. Nothing needs it at the end of a process; tests do."""
        if self._client is not None and self._client_pid == os.getpid():
            self._client.close()
        self._client = None

    def __enter__(self) -> Claude:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _connected(self) -> anthropic.Anthropic:
        with self._connecting:
            # One that made a request before fork() shares its connection with the parent: answers get mixed up.
            if self._client is None or self._client_pid != os.getpid():
                self._client = self._adopted() or self._made()
                self._client_pid = os.getpid()
            return self._client

    def _adopted(self) -> anthropic.Anthropic | None:
        """The one that `preload` has made, once in each process: it is unused, so a fork of it has no connections."""
        own = (self._api_key, self._base_url, self._transport)
        return _spare.pop() if _spare and self._settings == _spare_for and own == (None, None, None) else None

    def _made(self) -> anthropic.Anthropic:
        try:
            return make_client(self._settings, self._api_key, self._base_url, self._transport)
        except (anthropic.AnthropicError, OSError, ValueError, httpx2.InvalidURL) as error:
            raise ModelConfig(f"No client for the model can be made: {words(error)}") from None


_spare: list[anthropic.Anthropic] = []
_spare_for: Settings | None = None


def preload(settings: Settings | None = None) -> None:
    """Pay for the import and the first use in the worker's parent, before it forks; opens no socket. `settings`: of the
    tasks to come; a client for them is made, too (it takes 25 ms, most of it for the certificates)."""
    global _spare_for
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, json=_PRELOAD_ANSWER))
    with httpx2.Client(transport=transport) as http:
        client = anthropic.Anthropic(
            api_key="preload", base_url="http://preload.invalid", max_retries=0, http_client=http
        )
        request = {"model": "m", "max_tokens": 1}
        Call(load_settings({}), SystemClock(), request, [], lambda: None).run(client)
    if settings is not None and not _spare:
        with suppress(ModelConfig, anthropic.AnthropicError, OSError, ValueError, httpx2.InvalidURL):
            _spare[:], _spare_for = [make_client(settings)], settings  # else the task will tell what is wrong
    # Frozen objects are not touched by a child's garbage collector, so their pages stay shared.
    gc.collect()
    gc.freeze()


_PRELOAD_ANSWER = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": ""}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 0, "output_tokens": 0},
}
