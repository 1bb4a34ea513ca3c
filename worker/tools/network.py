"""HTTP connections that go only where they are allowed to, and end when they are told to.

httpcore2, the layer below httpx2, takes a network backend: ours resolves the host once, checks every address,
and connects to a checked one. URL, Host header, TLS name and certificate check stay those of the host, so no
second lookup can answer differently (DNS rebinding). Each read and write gets what is left of one deadline,
so a server that sends a byte now and then, headers included, cannot hold a worker. Proxies from the environment are not
used: behind one, the address that is finally connected to cannot be checked.
"""

from __future__ import annotations

import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

import httpcore2

from worker.errors import ToolFailure

Address = IPv4Address | IPv6Address

_CLOUD = frozenset({IPv4Address("168.63.129.16")})
"""Azure's in-guest service: a public address by its number, private by its nature."""
_NAT64 = IPv6Network("64:ff9b::/96")
_NAT64_LOCAL = IPv6Network("64:ff9b:1::/48")
"""Local by RFC 8215; Python counts it as global before 3.11.10."""


def is_public(address: Address) -> bool:
    """Whether an address is of the open internet, and so is every IPv4 address hidden inside of it."""
    if isinstance(address, IPv6Address):
        hidden = _hidden(address)
        if hidden:
            return all(is_public(inner) for inner in hidden)
        if address.is_site_local or address in _NAT64_LOCAL:
            return False
    return (
        address.is_global
        and not (address.is_private or address.is_loopback or address.is_link_local)
        and not (address.is_multicast or address.is_reserved or address.is_unspecified)
        and address not in _CLOUD
    )


def resolve(host: str, port: int, timeout_s: float, *, allow_private: bool) -> list[str]:
    """The addresses of `host`, all of them checked. Raises ToolFailure: unknown host, no answer in
    `timeout_s` seconds, or any address that is not public (unless `allow_private`)."""
    found = _lookup(host, port, timeout_s)
    for address in found:
        if not allow_private and not is_public(ip_address(address.partition("%")[0])):
            raise ToolFailure(f"{host} is at {address}, which is not a public internet address: refused.")
    return found


class GuardedBackend(httpcore2.NetworkBackend):
    """Connects to checked addresses only, until `deadline` (monotonic seconds)."""

    def __init__(self, deadline: float, *, allow_private: bool) -> None:
        self._deadline = deadline
        self._allow_private = allow_private
        self._inner = httpcore2.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.NetworkStream:
        addresses = resolve(host, port, time_left(self._deadline), allow_private=self._allow_private)
        for number, address in enumerate(addresses, 1):
            left = time_left(self._deadline)
            share = left / (len(addresses) - number + 1)  # a first address that swallows packets leaves time for others
            try:
                stream = self._inner.connect_tcp(address, port, share, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                if number == len(addresses):
                    raise
            else:
                return _TimedStream(stream, self._deadline)
        raise httpcore2.ConnectError(f"{host} has no address")


class _TimedStream(httpcore2.NetworkStream):
    """A stream whose every operation ends at the deadline at the latest."""

    def __init__(self, inner: httpcore2.NetworkStream, deadline: float) -> None:
        self._inner = inner
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, time_left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, time_left(self._deadline))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        stream = self._inner.start_tls(ssl_context, server_hostname, time_left(self._deadline))
        return _TimedStream(stream, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def time_left(deadline: float) -> float:
    """Seconds until `deadline`. Raises httpcore2.ReadTimeout when there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore2.ReadTimeout("the time is up")
    return left


def _hidden(address: IPv6Address) -> list[IPv4Address]:
    """IPv4 addresses that a gateway or the kernel would connect to instead of this IPv6 address."""
    hidden = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64 or (int(address) >> 32 == 0 and int(address) > 1):  # the latter: ::a.b.c.d
        hidden.append(IPv4Address(int(address) & 0xFFFF_FFFF))
    return [inner for inner in hidden if inner is not None]


def _lookup(host: str, port: int, timeout_s: float) -> list[str]:
    # getaddrinfo has no timeout of its own: it goes on in a daemon thread if nobody waits for it any more.
    answer: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.put(list(dict.fromkeys(str(info[4][0]) for info in infos)))
        except (OSError, UnicodeError) as error:  # UnicodeError: no name that DNS can hold
            answer.put(error)

    threading.Thread(target=ask, name="baton-dns", daemon=True).start()
    try:
        found = answer.get(timeout=timeout_s)
    except queue.Empty:
        raise ToolFailure(f"{host}: the name server did not answer in time.") from None
    if isinstance(found, Exception):
        raise ToolFailure(f"{host}: there is no such host ({found}).") from found
    return found
