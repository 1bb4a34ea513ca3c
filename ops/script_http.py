"""The HTTP side of the scripted model: carries out a plan, broken transports included.

A client that disappears is the everyday case here (killed workers do), so it makes no noise; and stopping
leaves no socket and no thread behind.
"""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ops.script_template import Fault
from ops.script_wire import encode, error_body, events

BODY_MAX_BYTES = 64_000_000
STOP_WAIT_S = 5
_HTML = b"<html><head><title>502 Bad Gateway</title></head><body>scripted gateway page</body></html>"

Headers = Mapping[str, str]


@dataclass
class Plan:
    """What to answer: `payload` as JSON or, with `stream`, as events; `fault` is how that goes wrong."""

    status: int
    headers: dict[str, str]
    payload: dict[str, Any]
    stream: bool = False
    fault: Fault | None = None
    delay_s: float = 0

    @classmethod
    def refusal(cls, status: int, message: str) -> Plan:
        return cls(status, {}, error_body(status, message))


class Server(ThreadingHTTPServer):
    """Asks `plan` about every request: (headers, lower-case names; body) -> Plan."""

    daemon_threads = True
    request_queue_size = 128  # a fleet starts all at once

    def __init__(self, address: tuple[str, int], plan: Callable[[Headers, bytes], Plan]) -> None:
        self.plan = plan
        self.stopping = threading.Event()
        self._open: set[socket.socket] = set()
        self._changed = threading.Condition()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own looks its name up in DNS, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        # Here, not in its thread: once the accept loop has ended, `_open` misses none.
        with self._changed:
            self._open.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changed:
                self._open.discard(request)
                self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def stop(self) -> None:
        self.stopping.set()
        self.shutdown()
        self.server_close()
        with self._changed:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the client was faster
            self._changed.wait_for(lambda: not self._open, timeout=STOP_WAIT_S)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    # Events are small and each is meant to arrive at once.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the request log is the record."""

    def do_GET(self) -> None:
        self._send(404, {}, json.dumps(error_body(404, "Not found")).encode())

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        if self.path.partition("?")[0] != "/v1/messages" or length > BODY_MAX_BYTES:
            self.close_connection = True
            status = 413 if length > BODY_MAX_BYTES else 404
            self._send(status, {}, json.dumps(error_body(status, f"{self.path}: refused")).encode())
            return
        raw = self.rfile.read(length)
        if len(raw) < length:
            return
        plan = self.server.plan({name.lower(): value for name, value in self.headers.items()}, raw)
        self._wait(plan.delay_s)
        if plan.stream:
            self._send_events(plan)
        else:
            self._send_whole(plan)

    def _send_whole(self, plan: Plan) -> None:
        data = json.dumps(plan.payload).encode()
        match plan.fault.kind if plan.fault else None:
            case None:
                self._send(plan.status, plan.headers, data)
            case "early_end":
                self._send(plan.status, plan.headers, data[: len(data) // 2])
            case "truncate":
                self._send(plan.status, plan.headers, data[: len(data) // 2], length=len(data))
                self.close_connection = True
            case "sse_error":
                assert plan.fault is not None
                self._send(529, plan.headers, json.dumps(plan.fault.error()).encode())
            case _:
                self._break(plan)

    def _send_events(self, plan: Plan) -> None:
        fault = plan.fault
        breaks_at = None
        if fault is not None:
            usual = 0 if fault.kind in ("hang", "reset", "html") else 4
            breaks_at = usual if fault.after_events is None else fault.after_events
        if breaks_at == 0 and fault is not None and fault.kind in ("hang", "reset", "html"):
            self._break(plan)
            return
        self.send_response(200)
        for name, value in {"content-type": "text/event-stream; charset=utf-8", **plan.headers}.items():
            self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number, event in enumerate(events(plan.payload)):
            if number == breaks_at:
                self._break(plan)
                return
            self._chunk(encode(event))
        self._chunk(b"")

    def _break(self, plan: Plan) -> None:
        """Do what the fault says instead of going on."""
        assert plan.fault is not None
        self.close_connection = plan.fault.kind in ("hang", "reset", "truncate")
        match plan.fault.kind:
            case "hang":
                self._wait(float("inf"))
            case "reset":
                self._reset()
            case "html":
                headers = {"content-type": "text/html", **plan.fault.headers}
                self._send(plan.fault.status or 200, headers, _HTML)
            case "sse_error":
                self._chunk(encode(plan.fault.error()))
                self._chunk(b"")
            case "early_end":
                self._chunk(b"")
            case "truncate":
                self.wfile.write(b"400\r\nevent: content_block_delta\nda")

    def _send(self, status: int, headers: Headers, data: bytes, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _reset(self) -> None:
        """RST instead of FIN: with linger 0 a close drops the connection on the floor."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()  # it holds the socket open
        self.connection.close()

    def _wait(self, seconds: float) -> None:
        """Let time pass until the client hangs up or the server stops; then raise ConnectionError."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self.server.stopping.wait(min(0.05, left)) or _hung_up(self.connection):
                raise ConnectionAbortedError


def _hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
