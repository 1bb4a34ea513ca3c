"""The SDK client, made so that what is wrong with key or address is said before the first request."""

from __future__ import annotations

import os

import anthropic
import httpx2

from worker import model_net
from worker.errors import ModelConfig
from worker.settings import Settings

CONNECT_TIMEOUT_S = 10
CONNECTIONS_MIN, KEPT_CONNECTIONS = 1000, 100  # the SDK's own limits


def make_client(
    settings: Settings,
    api_key: str | None = None,
    base_url: str | None = None,
    transport: httpx2.BaseTransport | None = None,
) -> anthropic.Anthropic:
    """A client without retries of its own. Raises ModelConfig before any request if it could not work."""
    _check_key("The API key", api_key)
    if api_key is None:
        for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
            _check_key(name, os.environ.get(name) or None)
    if os.environ.get("ANTHROPIC_BASE_URL", "unset").strip() == "":
        # The usual blank of a compose file. The SDK takes it for an address; passing None does not help.
        del os.environ["ANTHROPIC_BASE_URL"]
    _check_base_url(base_url or os.environ.get("ANTHROPIC_BASE_URL"))
    timeout = httpx2.Timeout(connect=CONNECT_TIMEOUT_S, read=settings.model_read_timeout_s, write=60, pool=30)
    http = _http_client(timeout, transport, settings.concurrency)
    try:
        client = anthropic.Anthropic(
            api_key=api_key, base_url=base_url or None, max_retries=0, timeout=timeout, http_client=http
        )
    except BaseException:
        http.close()
        raise
    headers = {name.lower() for name in client.default_headers}
    if client.credentials is None and not headers & {"authorization", "x-api-key"}:
        client.close()
        raise ModelConfig("No API key: set ANTHROPIC_API_KEY for the worker.")
    return client


def _http_client(timeout: httpx2.Timeout, transport: httpx2.BaseTransport | None, calls_max: int) -> httpx2.Client:
    """`calls_max`: so many may wait for their answers at once, each on a connection of its own."""
    if transport is not None:
        return httpx2.Client(transport=transport, timeout=timeout)
    limits = httpx2.Limits(max_connections=max(calls_max, CONNECTIONS_MIN), max_keepalive_connections=KEPT_CONNECTIONS)
    http = anthropic.DefaultHttpxClient(timeout=timeout, limits=limits)
    model_net.install(http)
    return http


def _check_key(name: str, key: str | None) -> None:
    """The SDK would send it as it is, fail as if the network were down, and quote it in the error."""
    if key is None:
        return
    if not key.strip():
        raise ModelConfig(f"{name} is blank: set it to the key, or unset it.")
    if not key.isascii() or not key.isprintable() or len(key.split()) != 1 or key != key.strip():
        raise ModelConfig(f"{name} holds a space, a line break or a character that no key has: copy the key again.")


def _check_base_url(url: str | None) -> None:
    if url is None:
        return
    parsed = httpx2.URL(url.strip())  # not quoted below: it may hold a gateway's password
    if parsed.scheme not in ("http", "https") or not parsed.host or url.split() != [url]:
        raise ModelConfig("ANTHROPIC_BASE_URL must start with http:// or https:// and name a host, without spaces.")
    if parsed.path.rstrip("/").endswith("/v1"):
        raise ModelConfig("ANTHROPIC_BASE_URL ends in /v1: leave that out, the client adds it.")
