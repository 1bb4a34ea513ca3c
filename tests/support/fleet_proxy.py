"""A way to Redis that loses one transaction's reply, or the transaction itself, when it is told to."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from enum import StrEnum
from select import select
from types import TracebackType
from urllib.parse import unquote, urlsplit

EXEC = b"$4\r\nEXEC\r\n"


class Loss(StrEnum):
    REPLY = "applied, and its reply lost"
    COMMAND = "lost on the way"


class LossyProxy:
    """Passes everything on, but for the n-th EXEC after `arm(n, loss)`: there the connection breaks."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        unix = parts.scheme == "unix"
        self._family = socket.AF_UNIX if unix else socket.AF_INET
        self._target = unquote(parts.path) if unix else (parts.hostname or "", parts.port or 6379)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._at, self._loss = 0, Loss.REPLY
        self.execs = 0
        self.lost = 0
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def arm(self, at: int, loss: Loss = Loss.REPLY) -> None:
        """From now on count anew; `at` 0 loses nothing."""
        with self._lock:
            self._at, self._loss, self.execs, self.lost = at, loss, 0, 0

    def __enter__(self) -> LossyProxy:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accept
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, socket.socket(self._family) as server, suppress(OSError):
            server.connect(self._target)
            while True:
                for ready in select([client, server], [], [])[0]:
                    data = ready.recv(1 << 20)
                    if not data:
                        return
                    loss = self._loss_of(data) if ready is client else None
                    if loss is Loss.COMMAND:
                        return
                    (server if ready is client else client).sendall(data)
                    if loss is Loss.REPLY:
                        server.shutdown(socket.SHUT_WR)
                        while server.recv(1 << 20):  # it answers all it was sent before it sees the end
                            pass
                        return

    def _loss_of(self, data: bytes) -> Loss | None:
        with self._lock:
            for _ in range(data.count(EXEC)):
                self.execs += 1
                if self.execs == self._at:
                    self.lost += 1
                    return self._loss
        return None
