"""fetch_url reaches the internet and nothing else, and always comes to an end."""

from __future__ import annotations

import gzip
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

import pytest

from tests.unit.tools_kit import answer, context, refusal
from worker.tools import ToolContext
from worker.tools import network as network_module
from worker.tools.builtin import fetch_url
from worker.tools.network import is_public


class Site:
    """A web server on the loopback address: path → (status, headers, body); it keeps what it was asked."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
                status, headers, body = site.pages.get(self.path, (404, {}, b"not here"))
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                with suppress(OSError):  # the client may have read enough
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def page(self, path: str, body: bytes = b"", status: int = 200, **headers: str) -> str:
        self.pages[path] = (status, {key.replace("_", "-"): value for key, value in headers.items()}, body)
        return self.url + path


@pytest.fixture(scope="module")
def running() -> Iterator[Site]:
    site = Site()
    thread = threading.Thread(target=site.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield site
    site.server.shutdown()
    site.server.server_close()
    thread.join()


@pytest.fixture
def site(running: Site) -> Site:
    running.pages.clear()
    running.asked.clear()
    return running


def inside(**settings: Any) -> ToolContext:
    return context(settings={"fetch_private": True, **settings})


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A name server of our own: host → addresses, one answer after the other; everything else as ever."""
    real = socket.getaddrinfo
    answers: dict[str, list[str]] = {}

    def lookup(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host in answers:
            address = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in address.split()]
        return real(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return answers


def test_a_page_is_returned_with_where_it_came_from(site: Site) -> None:
    url = site.page("/a?b=c", b"<p>caf\xe9", Content_Type="text/html; charset=ISO-8859-1")
    assert answer(fetch_url, inside(), url=url + "#part") == (
        f"{url} (text/html; charset=ISO-8859-1, 7 bytes)\n\n<p>café"
    )
    assert site.asked[0][1]["host"] == f"127.0.0.1:{site.port}"


def test_private_addresses_are_refused_before_anything_is_sent(site: Site) -> None:
    url = site.page("/a", b"internal")
    for host in ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.0.0.1", "0", "[::ffff:127.0.0.1]"):
        text = refusal(fetch_url, context(), url=url.replace("127.0.0.1", host))
        assert "refused" in text or "no such host" in text
    assert site.asked == []
    assert "internal" in answer(fetch_url, inside(), url=url), "control: it could be reached"


def test_each_hop_of_a_redirect_is_checked_again(
    site: Site, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names["public.example"] = ["127.0.0.1"]
    names["private.example"] = ["10.0.0.1"]
    monkeypatch.setattr(network_module, "is_public", lambda address: str(address) == "127.0.0.1")
    site.page("/go", status=302, Location="http://private.example/inner")
    text = refusal(fetch_url, context(), url=f"http://public.example:{site.port}/go")
    assert text == "private.example is at 10.0.0.1, which is not a public internet address: refused."
    assert [path for path, _ in site.asked] == ["/go"]


def test_a_name_that_changes_its_address_after_the_check_is_not_asked_again(
    site: Site, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the first answer is public, every later one is private."""
    site.page("/a", b"hello")
    names["rebind.example"] = ["127.0.0.1", "10.0.0.1"]
    monkeypatch.setattr(network_module, "is_public", lambda address: str(address) == "127.0.0.1")
    assert "hello" in answer(fetch_url, context(), url=f"http://rebind.example:{site.port}/a")
    assert names["rebind.example"] == ["10.0.0.1"], "one lookup"
    assert site.asked[0][1]["host"] == f"rebind.example:{site.port}"


def test_one_private_address_among_public_ones_is_enough_to_refuse(names: dict[str, list[str]]) -> None:
    names["mixed.example"] = ["93.184.215.14 10.0.0.1"]
    assert "10.0.0.1" in refusal(fetch_url, context(), url="http://mixed.example/")


def test_an_address_that_does_not_answer_is_followed_by_the_next(site: Site, names: dict[str, list[str]]) -> None:
    site.page("/a", b"hello")
    names["two.example"] = ["127.0.0.2 127.0.0.1"]  # the server listens on 127.0.0.1 only
    assert "hello" in answer(fetch_url, inside(), url=f"http://two.example:{site.port}/a")


PRIVATE = """0.0.0.0 0.1.2.3 10.1.2.3 100.64.0.1 127.0.0.1 127.9.9.9 168.63.129.16 169.254.169.254 172.16.0.1
172.31.255.255 192.0.0.1 192.0.2.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 240.0.0.1 255.255.255.255
:: ::1 ::127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 64:ff9b::10.0.0.1 64:ff9b:1::1 2002:7f00:1:: 2001:0:a00:1::
fc00::1 fd00:ec2::254 fe80::1 fec0::1 ff02::1 2001:db8::1"""
PUBLIC = "1.1.1.1 93.184.215.14 172.32.0.1 2606:4700:4700::1111 ::ffff:1.1.1.1 64:ff9b::1.1.1.1"


@pytest.mark.parametrize("address", PRIVATE.split())
def test_this_address_is_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC.split())
def test_this_address_is_public(address: str) -> None:
    assert is_public(ip_address(address))


BAD_URLS = ["file:///etc/passwd", "ftp://example.org/", "gopher://x", "example.org", "http://", "http://[::1", "//x",
            "http://user:secret@example.org/", "data:text/plain,hi"]  # fmt: skip


@pytest.mark.parametrize("url", BAD_URLS)
def test_only_plain_http_urls_are_fetched(url: str) -> None:
    text = refusal(fetch_url, inside(), url=url)
    assert "secret" not in text


def test_an_unknown_host_and_a_closed_port_are_failures_in_words(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "refused" in refusal(fetch_url, inside(), url=f"http://127.0.0.1:{port}/")

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "no such host" in refusal(fetch_url, context(), url="http://nowhere.example/")


def test_a_name_server_that_does_not_answer_costs_no_more_than_the_time_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: done.wait() and [])
    assert "name server" in refusal(fetch_url, inside(fetch_timeout_s=0.05), url="http://slow.example/")
    done.set()


def test_redirects_are_followed_up_to_a_bound(site: Site) -> None:
    site.page("/end", b"arrived", Content_Type="text/plain")
    for n in range(8):
        site.page(f"/{n}", status=301, Location=f"/{n - 1}" if n else "/end")
    assert answer(fetch_url, inside(), url=f"{site.url}/4").endswith("arrived")
    assert "more than 5 redirects" in refusal(fetch_url, inside(), url=f"{site.url}/5")
    site.page("/file", status=302, Location="file:///etc/passwd")
    assert "only http" in refusal(fetch_url, inside(), url=f"{site.url}/file")


def test_an_error_status_is_a_failure_with_the_status_and_the_servers_words(site: Site) -> None:
    assert refusal(fetch_url, inside(), url=f"{site.url}/nope") == (f"{site.url}/nope answered 404 Not Found: not here")
    assert "304" in refusal(fetch_url, inside(), url=site.page("/odd", status=304))
    assert "599" in refusal(fetch_url, inside(), url=site.page("/odd", status=599))


def test_only_so_much_is_read(site: Site) -> None:
    url = site.page("/big", b"~" * 1_000_000)
    text = answer(fetch_url, inside(fetch_max_bytes=1_000), url=url)
    assert "only the first 1000 bytes were read" in text
    assert text.count("~") == 1_000
    whole = answer(fetch_url, inside(fetch_max_bytes=1_000), url=site.page("/just", b"~" * 1_000))
    assert "1000 bytes" in whole
    assert "only" not in whole


def test_a_compressed_answer_is_read_and_a_bomb_does_not_blow_up(site: Site) -> None:
    """A thousandfold: 10 MB of zeros travel in 10 kB."""
    small = site.page("/gz", gzip.compress(b"hello"), Content_Encoding="gzip", Content_Type="text/plain")
    assert answer(fetch_url, inside(), url=small).endswith("hello")
    bomb = site.page("/bomb", gzip.compress(b"0" * 10_000_000), Content_Encoding="gzip")
    tracemalloc.start()
    assert "only the first 1000 bytes" in answer(fetch_url, inside(fetch_max_bytes=1_000), url=bomb)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2_000_000
    assert "damaged" in refusal(fetch_url, inside(), url=site.page("/bad", b"no gzip", Content_Encoding="gzip"))
    assert "'br'" in refusal(fetch_url, inside(), url=site.page("/br", b"??", Content_Encoding="br"))


def test_a_binary_answer_is_described_and_an_empty_one_is_said_to_be(site: Site) -> None:
    picture = site.page("/p", b"\x89PNG\0\xff" * 9, Content_Type="image/png")
    assert answer(fetch_url, inside(), url=picture).endswith("(image/png, 54 bytes)\n\n(binary content, not shown)")
    assert answer(fetch_url, inside(), url=site.page("/e")).endswith("(no content type, 0 bytes)\n\n(no text)")
    assert answer(fetch_url, inside(), url=site.page("/j", b"{}", Content_Type="application/ld+json")).endswith("{}")


@pytest.mark.parametrize("charset", ["punycode", "idna", "hex", "nonsense", "unicode_escape", "utf-7"])
def test_a_server_cannot_choose_a_codec_that_is_no_charset(site: Site, charset: str) -> None:
    url = site.page("/a", b"caf\xc3\xa9 \\x41-", Content_Type=f"text/plain; charset={charset}")
    assert answer(fetch_url, inside(), url=url).endswith("café \\x41-")


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\nX-", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"])
def test_a_server_that_sends_a_byte_now_and_then_does_not_hold_a_worker(start: bytes) -> None:
    """Each byte starts a read timeout anew; only a deadline for all of it ends this, headers included."""
    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            with server.accept()[0] as client:
                client.recv(10_000)
                client.sendall(start)
                while not gone.wait(0.01):
                    try:
                        client.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        text = refusal(fetch_url, inside(fetch_timeout_s=0.2), url=url)
        gone.set()
        thread.join()
    assert "took longer than 0.2 s" in text


def test_a_server_that_breaks_off_is_a_failure_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with server.accept()[0] as client:
                client.recv(10_000)

        thread = threading.Thread(target=hang_up)
        thread.start()
        text = refusal(fetch_url, inside(), url=f"http://127.0.0.1:{server.getsockname()[1]}/")
        thread.join()
    assert "disconnected" in text
