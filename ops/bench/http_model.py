"""A model over HTTP that a thousand tasks can wait for: it notes when each request came, and answers when told to."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from ops.bench.tools import answer
from ops.processes import wait_until

BACKLOG = 4096


@dataclass(frozen=True)
class Arrival:
    """A request: when it had come in whole, in seconds since 1970, and the first words of its task."""

    at: float
    text: str


class HttpModel:
    """Serves in a thread of its own while its `with` block runs."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.waiting = 0
        self._loop = asyncio.new_event_loop()
        self._free = asyncio.Event()
        self._free.set()
        self._port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="bench-model", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def hold(self) -> None:
        """Let requests wait from now on."""
        self._loop.call_soon_threadsafe(self._free.clear)

    def release(self) -> None:
        """Answer all that wait, and every one to come."""
        self._loop.call_soon_threadsafe(self._free.set)

    def await_arrivals(self, text: str, times: int = 1, *, timeout_s: float = 60) -> float:
        """When the task with this text asked for the `times`-th time. Raises TimeoutError."""

        def found() -> list[Arrival]:
            return [one for one in self.arrivals if one.text == text]

        if not wait_until(lambda: len(found()) >= times, timeout_s, poll_s=0.002):
            raise TimeoutError(f"{text!r} has not asked the model {times} times within {timeout_s:g} s")
        return found()[times - 1].at

    def await_waiting(self, number: int, *, timeout_s: float = 120) -> None:
        """Until so many requests wait at once. Raises TimeoutError."""
        if not wait_until(lambda: self.waiting >= number, timeout_s, poll_s=0.02):
            raise TimeoutError(f"only {self.waiting} of {number} tasks wait for the model after {timeout_s:g} s")

    def __enter__(self) -> HttpModel:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._talk, "127.0.0.1", 0, backlog=BACKLOG))
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        left = asyncio.all_tasks(self._loop)
        for one in left:
            one.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # A client that goes away is everyday: workers are killed here.
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    body = await reader.readexactly(_length(head))
                    await self._answer(body, writer)
        finally:
            writer.close()

    async def _answer(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        at, messages = time.time(), json.loads(body)["messages"]
        self.arrivals.append(Arrival(at, str(messages[0]["content"])))
        self.waiting += 1
        try:
            await self._free.wait()
        finally:
            self.waiting -= 1
        data = json.dumps(answer(messages)).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
