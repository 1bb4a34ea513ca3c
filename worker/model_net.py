"""Looking up from a silent socket: while the model thinks, `watch` is still asked every half second.

Without this a cancel, a lost lease or a drain would go unnoticed until the next stream event, or for the
whole read timeout when the server hangs. httpcore2 has an official place for it (its network backend);
httpx2 does not pass it on, so `install` reaches for the pool it made. If a later httpx2 keeps its pool
elsewhere, calls still work and watch only between events; a unit test tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import httpcore2
import httpx2

SLICE_S = 0.5

# A context variable, not an attribute: two threads sharing one client each have their own watch.
watching: ContextVar[Callable[[], None] | None] = ContextVar("baton_model_watch", default=None)


class WatchedStream(httpcore2.NetworkStream):
    """A connection whose long reads are made of short ones, with `watching` asked in between."""

    def __init__(self, inner: httpcore2.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        watch = watching.get()
        if watch is None:
            return self._inner.read(max_bytes, timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_S if end is None else end - time.monotonic()
            try:
                return self._inner.read(max_bytes, max(0.001, min(SLICE_S, left)))
            except httpcore2.ReadTimeout:
                if left <= SLICE_S and end is not None:
                    raise
            watch()

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        return WatchedStream(self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class WatchedBackend(httpcore2.NetworkBackend):
    """Makes WatchedStreams out of the connections of `inner`."""

    def __init__(self, inner: httpcore2.NetworkBackend) -> None:
        self._inner = inner

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        return WatchedStream(self._inner.connect_tcp(host, port, timeout, local_address, socket_options))

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        return WatchedStream(self._inner.connect_unix_socket(path, timeout, socket_options))

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


def install(client: httpx2.Client) -> bool:
    """Watch every connection `client` will open, through proxies too; False if httpx2 does not let us."""
    transports = [getattr(client, "_transport", None), *getattr(client, "_mounts", {}).values()]
    pools = [getattr(transport, "_pool", None) for transport in transports if transport is not None]
    watched = 0
    for pool in pools:
        inner = getattr(pool, "_network_backend", None)
        if isinstance(inner, httpcore2.NetworkBackend):
            vars(pool)["_network_backend"] = WatchedBackend(inner)
            watched += 1
    return bool(pools) and watched == len(pools)
