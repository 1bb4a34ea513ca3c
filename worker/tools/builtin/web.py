"""fetch_url: one page from the internet. The tool's docstring is read by the model."""

from __future__ import annotations

import re
import ssl
import time
import zlib
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Annotated

import httpcore2
import httpx2
from pydantic import Field

from worker.errors import ToolFailure
from worker.tools.base import tool
from worker.tools.context import ToolContext
from worker.tools.network import GuardedBackend

REDIRECTS_MAX = 5
ERROR_TEXT_MAX = 500
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = (
    ("Accept", "*/*"),
    ("Accept-Encoding", "identity"),  # what is not compressed cannot blow up; gzip is understood, and bounded
    ("User-Agent", "baton-agents (fetch_url)"),
    ("Connection", "close"),
)
_TEXT_TYPE = re.compile(r"text/.*|application/(.*\+)?(json|xml|javascript|yaml|x-ndjson|x-www-form-urlencoded)")
# An open list would let a server choose codecs such as punycode, whose decoding is quadratic.
_CHARSET = re.compile(
    r"utf-?(8|16|32)([lb]e)?|(us-)?ascii|iso-?8859-\d+|latin-?1|(windows-|cp)125\d"
    r"|koi8-[ru]|shift_?jis|euc-(jp|kr)|gb(2312|k|18030)|big5"
)


@dataclass(frozen=True)
class _Answer:
    url: httpx2.URL
    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool


@tool(effect="read_only")
def fetch_url(url: Annotated[str, Field(min_length=1, max_length=8_000)], context: ToolContext) -> str:
    """Fetch a URL with GET and return what it holds.

    The first line of the answer gives the final URL, content type and size; the text follows after an empty
    line, HTML as it is. A binary answer is only described. Up to 5 redirects are followed. A status of 400 or
    more, an unreachable server and one that takes too long are errors. Private and local network addresses
    are refused. Cookies, logins and other methods are not available.

    Args:
        url: Complete URL that begins with http:// or https://.
    """
    deadline = time.monotonic() + context.settings.fetch_timeout_s
    here = _checked(url)
    for _ in range(REDIRECTS_MAX + 1):
        answer = _get(here, deadline, context)
        target = answer.headers.get("location")
        if answer.status not in _REDIRECTS or target is None:
            return _told(answer)
        here = _checked(target, here)
    raise ToolFailure(f"{url}: more than {REDIRECTS_MAX} redirects; the last led to {here}.")


def _checked(url: str, base: httpx2.URL | None = None) -> httpx2.URL:
    try:
        parsed = httpx2.URL(url) if base is None else base.join(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ToolFailure(f"{url}: not a URL ({error}).") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ToolFailure(f"{url}: only http:// and https:// URLs can be fetched.")
    if parsed.userinfo:
        raise ToolFailure(f"{parsed.host}: URLs with a user name or password are refused.")
    return parsed.copy_with(fragment=None)


def _get(url: httpx2.URL, deadline: float, context: ToolContext) -> _Answer:
    limits = context.settings
    backend = GuardedBackend(deadline, allow_private=limits.fetch_private)
    target = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
    headers = [("Host", url.netloc.decode("ascii")), *_HEADERS]
    # A pool for one request: kept-alive connections and cookies must not be shared between hosts.
    pool = httpcore2.ConnectionPool(
        ssl_context=_tls() if url.scheme == "https" else None, network_backend=backend, max_connections=1
    )
    try:
        with pool, pool.stream("GET", target, headers=headers) as response:
            found = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in response.headers}
            body, complete = _read(response, found.get("content-encoding", ""), limits.fetch_max_bytes)
    except httpcore2.TimeoutException as error:
        raise ToolFailure(f"{url}: took longer than {limits.fetch_timeout_s:g} s.") from error
    except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
        raise ToolFailure(f"{url}: {error or type(error).__name__}.") from error
    return _Answer(url, response.status, found, body, complete)


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return httpx2.create_ssl_context()


def _read(response: httpcore2.Response, encoding: str, max_bytes: int) -> tuple[bytes, bool]:
    """At most `max_bytes` of the decoded body, and whether that is all of it."""
    name = encoding.strip().lower()
    if name not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise ToolFailure(f"The server sent content in the encoding {name!r}, which was not asked for.")
    inflate = zlib.decompressobj(47) if name not in ("", "identity") else None  # 47: gzip or zlib header
    body = bytearray()
    for chunk in response.iter_stream():
        room = max_bytes + 1 - len(body)
        try:
            body += chunk if inflate is None else inflate.decompress(chunk, room)
        except zlib.error as error:
            raise ToolFailure(f"The server sent damaged compressed content ({error}).") from error
        if len(body) > max_bytes:
            return bytes(body[:max_bytes]), False
    return bytes(body), True


def _told(answer: _Answer) -> str:
    kind = answer.headers.get("content-type", "").strip()
    text = _text(answer.body, kind)
    if not 200 <= answer.status < 300:
        said = f": {text[:ERROR_TEXT_MAX].strip()}" if text and text.strip() else "."
        raise ToolFailure(f"{answer.url} answered {answer.status} {_phrase(answer.status)}{said}")
    size = f"{len(answer.body)} bytes" if answer.complete else f"only the first {len(answer.body)} bytes were read"
    head = f"{answer.url} ({kind or 'no content type'}, {size})"
    if text is None:
        return f"{head}\n\n(binary content, not shown)"
    return f"{head}\n\n{text}" if text.strip() else f"{head}\n\n(no text)"


def _text(body: bytes, content_type: str) -> str | None:
    """The body as text; None if it is none."""
    kind, _, parameters = content_type.partition(";")
    charset = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", parameters, re.IGNORECASE)
    name = charset[1].lower() if charset else "utf-8"
    if _CHARSET.fullmatch(name) is None:
        name = "utf-8"
    try:
        text = body.decode(name, "replace")
    except LookupError:  # matches the list, and Python has no such codec
        text = body.decode("utf-8", "replace")
    if "\0" in text:
        return None
    if _TEXT_TYPE.fullmatch(kind.strip().lower()):
        return text
    # No type, or one that says nothing: text if nearly all of it decodes.
    return text if text.count("\ufffd") * 100 <= len(text) else None


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
