"""Ways to Redis that fail as networks do: one that loses one transaction, one that is cut, slow or a hole."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from enum import StrEnum
from select import select
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

EXEC = b"$4\r\nEXEC\r\n"
RENEWAL = b"$7\r\nPEXPIRE\r\n"
HELD_MAX_S = 60


class Loss(StrEnum):
    REPLY = "applied, and its reply lost"
    COMMAND = "lost on the way"


class _Broken(Exception):
    """This connection ends here."""


class _Proxy:
    """Listens at `url` and passes on what comes to a server. What happens on the way is the subclass's."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        unix = parts.scheme == "unix"
        self._family = socket.AF_UNIX if unix else socket.AF_INET
        self._target = unquote(parts.path) if unix else (parts.hostname or "", parts.port or 6379)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def __enter__(self) -> Self:
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
            threading.Thread(target=self._connected, args=(client,), daemon=True).start()

    def _connected(self, client: socket.socket) -> None:
        with client, socket.socket(self._family) as server, suppress(OSError, _Broken):
            server.connect(self._target)
            while True:
                for ready in select([client, server], [], [])[0]:
                    if not (data := ready.recv(1 << 20)):
                        return
                    self._pass_on(data, ready is client, client, server)

    def _pass_on(self, data: bytes, from_client: bool, client: socket.socket, server: socket.socket) -> None:
        """Bring one piece to the other side. Raises _Broken where the connection ends instead."""
        raise NotImplementedError


class LossyProxy(_Proxy):
    """Passes everything on, but for the n-th EXEC after `arm(n, loss)`: there the connection breaks.

    Renewals of leases are not counted: the heartbeat's come at any moment.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._at, self._loss = 0, Loss.REPLY
        self.execs = 0
        self.lost = 0

    def arm(self, at: int, loss: Loss = Loss.REPLY) -> None:
        """From now on count anew; `at` 0 loses nothing."""
        with self._lock:
            self._at, self._loss, self.execs, self.lost = at, loss, 0, 0

    def _pass_on(self, data: bytes, from_client: bool, client: socket.socket, server: socket.socket) -> None:
        loss = self._loss_of(data) if from_client else None
        if loss is Loss.COMMAND:
            raise _Broken
        (server if from_client else client).sendall(data)
        if loss is Loss.REPLY:
            server.shutdown(socket.SHUT_WR)
            while server.recv(1 << 20):  # it answers all it was sent before it sees the end
                pass
            raise _Broken

    def _loss_of(self, data: bytes) -> Loss | None:
        with self._lock:
            for _ in range(0 if RENEWAL in data else data.count(EXEC)):
                self.execs += 1
                if self.execs == self._at:
                    self.lost += 1
                    return self._loss
        return None


class Kept:
    """A message that a strait keeps back: the next one of a client that holds all of `words`."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = [word.encode() for word in words]
        self.there = threading.Event()
        self.decided = threading.Event()
        self.lost = False

    def await_it(self) -> None:
        """Wait until the message is there."""
        assert self.there.wait(HELD_MAX_S), f"no message with {self.words} came"

    def release(self, *, lost: bool = False) -> None:
        """Let it arrive; or lose it, and break its connection."""
        self.lost = lost
        self.decided.set()


class Strait(_Proxy):
    """A way that can be cut, be slow, swallow everything for a time, or keep back a message.

    What was swallowed or kept back arrives late, as TCP delivers it when a net is whole again.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.delay_s = 0.0
        self.cuts = 0  # connections that were ended or not let through
        self._open = threading.Event()
        self._open.set()
        self._is_cut = False
        self._clients: set[socket.socket] = set()
        self._keeping: list[Kept] = []

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(None, None, None)
        self.cut()
        self._open.set()
        for kept in self._keeping:
            kept.release(lost=True)

    def cut(self) -> None:
        """End all connections, and let no new one through until `heal`."""
        with self._lock:
            self._is_cut = True
            ended, self._clients = self._clients, set()
            self.cuts += len(ended)
        for one in ended:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def swallow(self) -> None:
        """From now on nothing arrives on either side, and neither side is told, until `heal`: a black hole."""
        self._open.clear()

    def heal(self) -> None:
        """The way is as it was. What was swallowed arrives now."""
        self._is_cut = False
        self._open.set()

    def keep(self, *words: str) -> Kept:
        """Keep back the next message with all these words: say, the event that a transaction tells of, and a task."""
        kept = Kept(words)
        with self._lock:
            self._keeping.append(kept)
        return kept

    def _connected(self, client: socket.socket) -> None:
        with self._lock:
            if self._is_cut:
                self.cuts += 1
                client.close()
                return
            self._clients.add(client)
        try:
            super()._connected(client)
        finally:
            with self._lock:
                self._clients.discard(client)

    def _pass_on(self, data: bytes, from_client: bool, client: socket.socket, server: socket.socket) -> None:
        self._open.wait()
        if not from_client:
            client.sendall(data)
            return
        time.sleep(self.delay_s)
        if kept := self._kept(data):
            kept.there.set()
            kept.decided.wait(HELD_MAX_S)
            if kept.lost:
                raise _Broken
        server.sendall(data)

    def _kept(self, data: bytes) -> Kept | None:
        with self._lock:
            found = next((kept for kept in self._keeping if all(word in data for word in kept.words)), None)
            if found:
                self._keeping.remove(found)  # this one message, and no other
        return found
